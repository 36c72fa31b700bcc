"""JSON or HJSON text to data, with the line and column of everything in it, as DeepSpeed reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson
from hjson.decoder import HjsonDecoder, JSONArray, JSONObject, make_scanner

from ds_toolkit.config.subject import json_pointer
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Where
from ds_toolkit.units import format_bytes

# The longest configs in the wild are a few kilobytes; a checkpoint named by mistake is not worth parsing.
MAX_BYTES = 8 * 2**20
_NEEDS_QUOTES = re.compile(r"""[{}\[\],:\s"'\\]""")


@dataclass(frozen=True)
class Document:
    """A configuration that was read from text.

    Attributes:
        data: what the text says.
        file: the name to show to people, None where there is none.
    """

    data: dict[str, object]
    file: str | None
    _text: str = field(repr=False)
    _offsets: dict[str, int] = field(repr=False)

    def where(self, pointer: str) -> Where:
        """The place of a key (or of an item of a list); or of the nearest thing around it."""
        near = pointer
        while near and near not in self._offsets:
            near = near.rpartition("/")[0]
        return Where(self.file, pointer, *_line_and_column(self._text, self._offsets.get(near, 0)))


def read_config(path: Path) -> Document:
    """Read a ds_config file.

    Raises:
        ToolkitError: it cannot be opened, is not UTF-8 text, or is not an object in JSON or HJSON.
    """
    try:
        size_bytes = path.stat().st_size
        if path.is_file() and size_bytes > MAX_BYTES:
            raise ToolkitError(
                f"{format_bytes(size_bytes)} is too long for a configuration",
                where=path,
                fix="give the path of the ds_config, not of a checkpoint or a log",
            )
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ToolkitError("the configuration cannot be read", where=path, why=error.strerror) from error
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        raise ToolkitError(
            "the configuration is not text", where=path, why=why, fix="save it as UTF-8"
        ) from error
    return read_config_text(text, file=str(path))


def read_config_text(text: str, file: str | None = None) -> Document:
    """Read a ds_config from text; an empty text is an empty object, as DeepSpeed has it.

    Raises:
        ToolkitError: with line and column: it is not an object in JSON or HJSON, or a key stands twice.
    """
    decoder = _PositionDecoder()

    def refuse(what: str, offset: int, why: str | None, fix: str | None) -> ToolkitError:
        line, column = _line_and_column(text, offset)
        return ToolkitError(
            what, where=str(Where(file or "configuration", None, line, column)), why=why, fix=fix
        )

    try:
        data = decoder.decode(text)
    except _DuplicateKeyError as error:
        why = "DeepSpeed refuses a configuration that says the same thing twice"
        raise refuse(f"the key `{error.key}` stands twice", error.offset, why, "keep one of them") from error
    except hjson.HjsonDecodeError as error:
        found = repr(text[error.pos : error.pos + 1]) if error.pos < len(text) else "the end of the text"
        why = f"{error.msg.replace('%r', found)}; found {found}"
        raise refuse("this is neither JSON nor HJSON", error.pos, why, None) from error
    except RecursionError as error:
        raise refuse("the configuration is nested too deeply", 0, None, None) from error
    except (ValueError, OverflowError, IndexError) as error:
        # The decoder runs off the end of unfinished comments, and into numbers that no float holds.
        why = "a number is out of range, or a comment or text in ''' has no end"
        raise refuse("this is neither JSON nor HJSON", 0, why, None) from error
    if not isinstance(data, dict):
        why = f"expected an object `{{...}}`, found {type(data).__name__}"
        raise refuse("this is not a configuration", 0, why, None)
    return Document(data, file, text, decoder.offsets_of(data))


class _DuplicateKeyError(Exception):
    def __init__(self, key: str, offset: int) -> None:
        super().__init__(key)
        self.key = key
        self.offset = offset


class _PositionDecoder(HjsonDecoder):  # type: ignore[misc]  # hjson ships no types
    """The decoder that DeepSpeed uses, remembering where each member of an object or a list began."""

    def __init__(self) -> None:
        super().__init__()
        # Keyed by the id of the object or list; it stays valid, since each is a part of the result.
        self._members: dict[int, dict[str | int, int]] = {}

        def object_with_offsets(state: Any, encoding: Any, strict: Any, scan: Any, *rest: Any) -> Any:
            starts: list[int] = []
            text, _ = state

            def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
                members: dict[str | int, int] = {}
                for (key, _value), start in zip(pairs, starts, strict=True):
                    offset = _key_offset(text, key, start)
                    if key in members:
                        raise _DuplicateKeyError(key, offset)
                    members[key] = offset
                data = dict(pairs)
                self._members[id(data)] = members
                return data

            _object_hook, _pairs_hook, *memo = rest
            return JSONObject(state, encoding, strict, _noting(scan, starts), None, build, *memo)

        def array_with_offsets(state: Any, scan: Any) -> Any:
            starts: list[int] = []
            values, end = JSONArray(state, _noting(scan, starts))
            self._members[id(values)] = dict(enumerate(starts))
            return values, end

        self.parse_object, self.parse_array = object_with_offsets, array_with_offsets
        self.scan_once, self.scan_object_once = make_scanner(self)

    def offsets_of(self, data: object) -> dict[str, int]:
        """The offset of every pointer into data that this decoder made."""
        offsets: dict[str, int] = {}
        pending: list[tuple[str, Any]] = [("", data)]
        while pending:
            pointer, value = pending.pop()
            items: Any = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in items:
                child_pointer = pointer + json_pointer(key)
                offsets[child_pointer] = self._members[id(value)][key]
                if isinstance(child, dict | list):
                    pending.append((child_pointer, child))
        return offsets


def _noting(scan: Callable[[str, int], Any], starts: list[int]) -> Callable[[str, int], Any]:
    def scan_and_note(text: str, offset: int) -> Any:
        starts.append(offset)
        return scan(text, offset)

    return scan_and_note


def _key_offset(text: str, key: str, value_offset: int) -> int:
    # Between a key and its value stand a colon, blanks and comments, so the last occurrence is the one; a key
    # written with escapes is not found, and then the value's place must do.
    quoted = max(text.rfind(f"{quote}{key}{quote}", 0, value_offset) for quote in "\"'")
    if _NEEDS_QUOTES.search(key) or not key:
        return quoted if quoted >= 0 else value_offset
    bare = text.rfind(key, 0, value_offset)
    if bare < 0:
        return value_offset
    return quoted if quoted == bare - 1 else bare


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
