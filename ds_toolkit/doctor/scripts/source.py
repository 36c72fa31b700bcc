"""Bytes of a script or a notebook in, text and syntax tree out; nothing of it is executed."""

from __future__ import annotations

import ast
import codecs
import io
import json
import re
import sys
import tokenize
import warnings
from dataclasses import dataclass

from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Where

MAX_BYTES = 5_000_000
_TOO_DEEP = "nested too deeply to be read"
_WIDE = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_PYTHON_2 = re.compile(
    r"^\s*(print\s+[^\s(=.:,)]|exec\s+['\"]|except\s+[\w.]+\s*,\s*\w+\s*:|raise\s+\w+\s*,)"
)
# `%time x`, `!pip install y`, `?z` and `%%bash` are for the notebook, not for Python.
_MAGIC = re.compile(r"^\s*(%|!|\?)")
_CELL_MAGIC = re.compile(r"^\s*%%(?!time|capture|prun)")


@dataclass(frozen=True)
class Source:
    """A text and where its lines come from.

    Attributes:
        name: what to call it in findings.
        text: Python, all code cells of a notebook one after another.
        tree: its syntax tree.
        places: for a notebook the JSON pointer of each line; empty for a script.
    """

    name: str
    text: str
    tree: ast.Module
    places: tuple[str, ...] = ()

    def where(self, pointer: str) -> Where:
        """The place of a problem whose pointer is `line:offset`, the offset in bytes of UTF-8."""
        number, _, offset = pointer.partition(":")
        line = int(number)
        if self.places:
            return Where(self.name, self.places[line - 1])
        # ast counts lines as Python does: a form feed ends none.
        text = re.split(r"\r\n|\r|\n", self.text)[line - 1]
        return Where(self.name, None, line, len(text.encode()[: int(offset)].decode(errors="ignore")) + 1)


def read_source(data: bytes, name: str) -> Source:
    """Read a script, or the code cells of a notebook where the name ends with `.ipynb`.

    Raises:
        ToolkitError: it is too long, no text in the encoding that it declares, or not Python as this
            interpreter knows it.
    """
    if len(data) > MAX_BYTES:
        raise ToolkitError(
            f"more than {MAX_BYTES // 1_000_000} MB is too long for a script",
            where=name,
            fix="give the path of the training script, not of data or a log",
        )
    if name.lower().endswith(".ipynb"):
        text, places = _code_of_notebook(data, name)
        return Source(name, text, _parsed(text, name, places), tuple(places))
    text = _decoded(data, name)
    return Source(name, text, _parsed(text, name, []))


def _decoded(data: bytes, name: str) -> str:
    wide = next((encoding for mark, encoding in _WIDE.items() if data.startswith(mark)), None)
    if wide:
        raise ToolkitError(
            "the script is not UTF-8 text", where=name, why=f"it is {wide}", fix="save it as UTF-8"
        )
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise ToolkitError(
            "the script holds a null byte, which Python refuses",
            where=f"{name}:{line}",
            fix="give a Python script, not a compiled or a binary file",
        )
    try:
        # Python's own reading of `# -*- coding: ... -*-` (PEP 263) and of a byte order mark.
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise _not_decoded(data, name, str(error.msg)) from error
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not {encoding}"
        raise _not_decoded(data[: error.start], name, why) from error


def _not_decoded(before: bytes, name: str, why: str) -> ToolkitError:
    return ToolkitError(
        "the script is not text in the encoding that it declares",
        where=f"{name}:{before.count(10) + 1}" if "byte" in why else f"{name}:1",
        why=why,
        fix="save it as UTF-8, or declare its encoding in the first line: # -*- coding: latin-1 -*-",
    )


def _parsed(text: str, name: str, places: list[str]) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # "\d" in a string of the user's is no business of this command.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise _syntax_error(error, text, name, places) from error
    except (RecursionError, MemoryError) as error:
        # The parser has one word for both: its stack is at an end.
        raise ToolkitError(
            f"the script is {_TOO_DEEP}", where=name, fix="split its longest expression"
        ) from error
    except ValueError as error:
        raise ToolkitError("the script is not Python", where=name, why=str(error)) from error


def _syntax_error(error: SyntaxError, text: str, name: str, places: list[str]) -> ToolkitError:
    line = max(1, error.lineno or 1)
    lines = text.splitlines()
    shown = lines[line - 1].strip()[:80] if line <= len(lines) else ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if "too many nested" in str(error.msg) or "too many levels" in str(error.msg):
        return ToolkitError(f"the script is {_TOO_DEEP}", where=f"{name}:{line}", why=error.msg)
    if any(_PYTHON_2.match(each) for each in lines):
        fix = "it looks like Python 2: convert it, DeepSpeed runs on Python 3 only"
    else:
        fix = "mend the line; if another Python accepts it, run ds-toolkit with that one"
    place = f"{name} {places[line - 1]}" if places and line <= len(places) else f"{name}:{line}"
    if not places and error.offset:
        place += f":{error.offset}"
    return ToolkitError(
        "the script cannot be parsed",
        where=place,
        why=f"Python {version}: {error.msg}\n{shown}".strip(),
        fix=fix,
    )


def _code_of_notebook(data: bytes, name: str) -> tuple[str, list[str]]:
    """The lines of all code cells, those for the notebook itself blanked, and the pointer of each line."""
    try:
        cells = json.loads(data)["cells"]
        codes = [
            (number, cell["source"]) for number, cell in enumerate(cells) if cell.get("cell_type") == "code"
        ]
        lines = [
            (f"/cells/{number}/source", line, position)
            for number, code in codes
            for position, line in enumerate(_lines_of_cell(code))
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ToolkitError(
            "the notebook cannot be read", where=name, why="it is not JSON of Jupyter's format 4"
        ) from error
    text = "\n".join(line for _, line, _ in lines)
    return text + "\n", [f"{cell}/{position}" for cell, _, position in lines] or ["/cells"]


def _lines_of_cell(code: str | list[str]) -> list[str]:
    lines = (code if isinstance(code, str) else "".join(code)).splitlines()
    if any(_CELL_MAGIC.match(line) for line in lines[:1]):
        return ["" for _ in lines]
    # `pass` keeps a block whole whose only line it was.
    return [_MAGIC.split(line)[0] + "pass" if _MAGIC.match(line) else line for line in lines]
