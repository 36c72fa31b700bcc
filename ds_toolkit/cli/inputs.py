"""Files for the linter: read once, told apart by name or content, and handed to the room that knows them."""

from __future__ import annotations

import codecs
import re
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ds_toolkit.errors import ToolkitError

STANDARD_INPUT = "-"
_ENTRY_OF_A_HOSTFILE = re.compile(r"^\s*\S+\s+slots\s*=", re.MULTILINE)
_LINE_OF_AN_ENV_FILE = re.compile(r"^\s*(export\s+)?[A-Za-z_][A-Za-z0-9_]*\s*=", re.MULTILINE)
_OTHER_ENCODINGS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}


class Kind(str, Enum):
    """What the linter knows."""

    DS_CONFIG = "ds_config"
    ENV = "env"
    HOSTFILE = "hostfile"


@dataclass(frozen=True)
class Input:
    """A text to lint; `path` is None for standard input."""

    name: str
    path: Path | None
    text: str
    kind: Kind


def read_input(name: str, kind: Kind | None) -> Input:
    """Read a file, or standard input for `-`, and tell what it is unless that is said.

    Raises:
        ToolkitError: it cannot be read, is too long, or is not UTF-8 text.
    """
    path = None if name == STANDARD_INPUT else Path(name)
    shown = "<stdin>" if path is None else name
    text = _decoded(_bytes_of(path), shown)
    return Input(shown, path, text, kind or _kind(path, text))


def _bytes_of(path: Path | None) -> bytes:
    from ds_toolkit.config.reader import MAX_BYTES
    from ds_toolkit.units import format_bytes

    try:
        if path is None:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ToolkitError("the file cannot be read", where=path, why=error.strerror) from error
    if len(data) > MAX_BYTES:
        raise ToolkitError(
            f"more than {format_bytes(MAX_BYTES)} is too long for a configuration",
            where=path,
            fix="give the path of the ds_config, not of a checkpoint or a log",
        )
    return data


def _decoded(data: bytes, shown: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        encoding = next((name for mark, name in _OTHER_ENCODINGS.items() if data.startswith(mark)), None)
        why = f"it is {encoding}" if encoding else f"byte {error.start} is not UTF-8"
        raise ToolkitError(
            "the file is not UTF-8 text", where=shown, why=why, fix="save it as UTF-8"
        ) from error


def _kind(path: Path | None, text: str) -> Kind:
    name = path.name.lower() if path is not None else ""
    if name.endswith((".json", ".hjson")):
        return Kind.DS_CONFIG
    if name.endswith(("_env", ".env")) or "deepspeed_env" in name:
        return Kind.ENV
    if name.startswith("host") and "." not in name.rpartition("hostfile")[2]:
        return Kind.HOSTFILE
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return Kind.DS_CONFIG
    if _ENTRY_OF_A_HOSTFILE.search(text):
        return Kind.HOSTFILE
    return Kind.ENV if _LINE_OF_AN_ENV_FILE.search(text) else Kind.DS_CONFIG
