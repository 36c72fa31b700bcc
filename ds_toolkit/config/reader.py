"""JSON or HJSON text to data, with the line and column of everything in it, as DeepSpeed reads it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hjson
from hjson.decoder import HjsonDecoder, JSONArray, JSONObject, make_scanner, scantfnns

from ds_toolkit.config.subject import json_pointer
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Where
from ds_toolkit.units import format_bytes

# The longest configs in the wild are a few kilobytes; a checkpoint named by mistake is not worth parsing.
MAX_BYTES = 8 * 2**20
# DeepSpeed passes over it; a reader of strict JSON stops there.
BYTE_ORDER_MARK = "\ufeff"
_PLAIN = re.compile(r"true|false|null|-?[0-9.]+([eE][-+]?[0-9]+)?")
_JSON_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)")
_NEEDS_QUOTES = re.compile(r"""[{}\[\],:\s"'\\]""")


@dataclass(frozen=True)
class Span:
    """Where a member lies in a text, in characters from its start.

    Attributes:
        key: the first character of the key, quotes counted; of the value where the key is not found or none.
        value: the first character of the value.
        end: the one behind the value.
    """

    key: int
    value: int
    end: int


@dataclass(frozen=True)
class Document:
    """A configuration that was read from text.

    Attributes:
        data: what the text says.
        file: the name to show to people, None where there is none.
        text: the text itself.
        spans: the place of every pointer but the root's.
        repeated: places of keys that had been said before in the same object, with the pointers.
    """

    data: dict[str, object]
    file: str | None
    text: str = field(repr=False)
    spans: dict[str, Span] = field(repr=False)
    repeated: list[tuple[str, int]] = field(default_factory=list)

    def where(self, pointer: str) -> Where:
        """The place of a key (or of an item of a list); or of the nearest thing around it."""
        near = pointer
        while near and near not in self.spans:
            near = near.rpartition("/")[0]
        offset = self.spans[near].key if near in self.spans else 0
        return Where(self.file, pointer, *_line_and_column(self.text, offset))

    def at(self, pointer: str, offset: int) -> Where:
        """A place in the text by its offset, as something to say about this pointer."""
        return Where(self.file, pointer, *_line_and_column(self.text, offset))

    @functools.cached_property
    def is_json(self) -> bool:
        """Whether the text is JSON proper: no comments, no bare words, no trailing commas."""
        try:
            json.loads(self.text)
        except (ValueError, RecursionError):
            return False
        return True

    def float_in_json(self, pointer: str) -> float | None:
        """A number that Python's JSON reader takes for a float where HJSON sees a whole one, such as 1e3."""
        span = self.spans.get(pointer)
        text = "" if span is None else self.text[span.value : span.end]
        return float(text) if _JSON_FLOAT.fullmatch(text) else None

    def bare_words(self) -> Iterator[tuple[str, str]]:
        """Texts that stand without quotes, with their pointers; HJSON ends them at the end of the line."""
        for pointer, span in self.spans.items():
            if self.text[span.value : span.value + 1] not in tuple("\"'{["):
                value = self.text[span.value : span.end].strip()
                if not _PLAIN.fullmatch(value):
                    yield pointer, value


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
        text = path.read_bytes().decode()
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

    Of a key that stands twice the last value counts, and `Document.repeated` names it.

    Raises:
        ToolkitError: with line and column: it is not an object in JSON or HJSON.
    """
    decoder = _PositionDecoder()

    def refuse(what: str, offset: int, why: str | None, fix: str | None) -> ToolkitError:
        line, column = _line_and_column(text, offset)
        return ToolkitError(
            what, where=str(Where(file or "configuration", None, line, column)), why=why, fix=fix
        )

    try:
        data = decoder.decode(text)
    except hjson.HjsonDecodeError as error:
        if decoder.swallowed is not None:
            offset, word = decoder.swallowed
            first = re.split(r"[\s,}\]]", word, maxsplit=1)[0]
            fix = {"True": "write true", "False": "write false", "None": "write null"}.get(first)
            why = f"HJSON ends it at the end of the line, so this one is `{_shortened(word)}`"
            fix = fix or f'put quotes around it: "{_shortened(first)}"'
            raise refuse("a text without quotes takes the rest of its line", offset, why, fix) from error
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
    spans, repeated = decoder.places_of(data)
    return Document(data, file, text, spans, repeated)


class _PositionDecoder(HjsonDecoder):  # type: ignore[misc]  # hjson ships no types
    """The decoder that DeepSpeed uses, remembering where each member of an object or a list began."""

    def __init__(self) -> None:
        super().__init__()
        # Keyed by the id of the object or list; it stays valid, since each is a part of the result.
        self._members: dict[int, dict[str | int, Span]] = {}
        self._repeated: dict[int, list[tuple[str, int]]] = {}
        # The first text without quotes that took a closing bracket with it, and its place.
        self.swallowed: tuple[int, str] | None = None

        def object_with_places(state: Any, encoding: Any, strict: Any, scan: Any, *rest: Any) -> Any:
            values: list[tuple[int, int]] = []
            text, _ = state

            def build(pairs: list[tuple[str, object]]) -> dict[str, object]:
                spans: dict[str | int, Span] = {}
                data = dict(pairs)
                for (key, _value), (start, end) in zip(pairs, values, strict=True):
                    span = Span(_key_offset(text, key, start), start, end)
                    if key in spans:
                        self._repeated.setdefault(id(data), []).append((key, span.key))
                    spans[key] = span
                self._members[id(data)] = spans
                return data

            _object_hook, _pairs_hook, *memo = rest
            return JSONObject(state, encoding, strict, _noting(scan, values), None, build, *memo)

        def array_with_places(state: Any, scan: Any) -> Any:
            values: list[tuple[int, int]] = []
            items, end = JSONArray(state, _noting(scan, values))
            self._members[id(items)] = {
                index: Span(start, start, after) for index, (start, after) in enumerate(values)
            }
            return items, end

        def word_with_place(context: Any, text: str, offset: int) -> Any:
            value, end = scantfnns(context, text, offset)
            if self.swallowed is None and isinstance(value, str) and _takes_closing_brackets(value):
                self.swallowed = offset, value
            return value, end

        self.parse_object, self.parse_array = object_with_places, array_with_places
        self.parse_tfnns = word_with_place
        self.scan_once, self.scan_object_once = make_scanner(self)

    def places_of(self, data: object) -> tuple[dict[str, Span], list[tuple[str, int]]]:
        """The span of every pointer into data that this decoder made, and the keys that were repeated."""
        spans: dict[str, Span] = {}
        repeated: list[tuple[str, int]] = []
        pending: list[tuple[str, Any]] = [("", data)]
        while pending:
            pointer, value = pending.pop()
            repeated += [(pointer + json_pointer(key), at) for key, at in self._repeated.get(id(value), [])]
            items: Any = value.items() if isinstance(value, dict) else enumerate(value)
            for key, child in items:
                child_pointer = pointer + json_pointer(key)
                spans[child_pointer] = self._members[id(value)][key]
                if isinstance(child, dict | list):
                    pending.append((child_pointer, child))
        return spans, repeated


def _noting(scan: Callable[[str, int], Any], values: list[tuple[int, int]]) -> Callable[[str, int], Any]:
    def scan_and_note(text: str, offset: int) -> Any:
        value, end = scan(text, offset)
        values.append((offset, end))
        return value, end

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
    return quoted if 0 <= quoted == bare - 1 else bare


def _takes_closing_brackets(word: str) -> bool:
    return any(word.count(close) > word.count(open_) for open_, close in ("{}", "[]"))


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    # Editors count no column for the mark.
    line_start = max(text.rfind("\n", 0, offset) + 1, int(text.startswith(BYTE_ORDER_MARK)))
    return text.count("\n", 0, offset) + 1, max(offset - line_start, 0) + 1
