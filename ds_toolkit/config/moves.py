"""A member of a configuration's text moved to another object, with its comments and its new indentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ds_toolkit.config.reader import Document, Span

_COMMENT = r"(?:(?:#|//)[^\r\n]*|/\*.*?\*/)"
_BETWEEN = re.compile(rf"(?P<comment>{_COMMENT})|(?P<comma>,)", re.DOTALL)
# What may stand behind a value or an opening bracket on the rest of its line.
_BEHIND = re.compile(rf"(?P<comma>[ \t]*,)?[ \t]*(?P<comment>{_COMMENT})?[ \t]*(?P<end>\r?\n|\Z)", re.DOTALL)
_BEFORE_ROOT = re.compile(rf"\ufeff?(?:\s|{_COMMENT})*", re.DOTALL)
_BLANK = re.compile(r"[ \t]*")
_LINE_END = re.compile(r"[ \t]*\r?\n")
_USUAL_UNIT = "  "

# Start, end, what comes there instead.
Change = tuple[int, int, str]


@dataclass(frozen=True)
class Member:
    """A key and its value as text, without the indentation of the place that it comes from.

    Attributes:
        lines: the text itself.
        comments: comments of its own that stood on the lines above.
        remark: a comment that stood behind it.
    """

    lines: list[str]
    comments: list[str]
    remark: str

    @property
    def is_short(self) -> bool:
        """Whether it fits into an object that is written on one line."""
        return len(self.lines) == 1 and not self.comments and not self.remark

    def wrapped(self, names: Iterable[str], unit: str, *, on_one_line: bool) -> Member:
        """The same inside of objects with these names, the innermost first."""
        lines = self.lines
        for name in names:
            key = f"{json.dumps(name)}: {{"
            short = len(lines) == 1 and on_one_line
            lines = [f"{key}{lines[0]}}}"] if short else [key, *_indented(lines, unit), "}"]
        return replace(self, lines=lines)

    def text(self, indent: str, comma: str, newline: str) -> str:
        """All of its lines; the last has no end."""
        text = newline.join(_indented([*self.comments, *self.lines], indent)) + comma
        return f"{text} {self.remark}" if self.remark else text


@dataclass(frozen=True)
class Braces:
    """An object in a text.

    Attributes:
        opening: where its bracket is; -1 for a document that goes without.
        closing: where its other bracket is.
        members: its members, in the order of the text.
        begins_line: whether its own key stands at the beginning of a line.
    """

    opening: int
    closing: int
    members: list[Span]
    begins_line: bool


def moved_text(document: Document, pointer: str, member_text: str, section: str, comma: str) -> str | None:
    """The text with a member at the beginning of another object, which is made where there is none.

    It is a proposal, to be read and compared with what is wanted: HJSON has spellings beyond this.

    Args:
        document: what was read.
        pointer: the member.
        member_text: its key and value as they are to be.
        section: the pointer of the object.
        comma: what parts members: a comma, or nothing where they stand on lines of their own.
    """
    text, span, parent = document.text, document.spans[pointer], pointer.rpartition("/")[0]
    names, missing = section.split("/")[1:], []
    while names and _pointer(names) not in document.spans:
        missing.append(_name(names.pop()))
    unit, newline = _unit(document), "\r\n" if "\r\n" in text else "\n"
    indent, target = _indent_at(text, span.key), _braces(document, _pointer(names))
    member = Member(_without_indent(member_text, indent), [], "")
    if missing and _pointer(names) == parent:
        # The object that is missing takes the place of the member.
        wrapped = member.wrapped(missing, unit, on_one_line=not _begins_line(text, span.key))
        return _changed(text, [(span.key, _end(text, span), wrapped.text(indent, "", newline).lstrip(" \t"))])
    if target.opening < 0 or text[target.opening] != "{":
        return None
    cuts, comments, remark = _cut(text, span, _braces(document, parent))
    on_one_line = _is_on_one_line(text, target)
    member = replace(member, comments=comments, remark=remark).wrapped(missing, unit, on_one_line=on_one_line)
    return _changed(text, [*cuts, *_insertion(text, target, member, comma, unit, newline)])


def separators(document: Document) -> tuple[str, str]:
    """What may part the members of a text, what it uses itself first: HJSON may do without commas."""
    text, spans = document.text, _braces(document, "").members
    behind = {text[_end(text, span) :].lstrip(" \t")[:1] for span in spans}
    uses_commas = document.is_json or "," in behind or len(spans) < 2
    return (",", "") if uses_commas else ("", ",")


def _cut(text: str, span: Span, parent: Braces) -> tuple[list[Change], list[str], str]:
    """What to take out for a member: itself, its comments and a comma; and these comments."""
    before = [_end(text, other) for other in parent.members if other.key < span.key]
    gap_start = max(before, default=parent.opening + 1)
    between = list(_BETWEEN.finditer(text, gap_start, span.key))
    commas = [match.start() for match in between if match["comma"]]
    behind = _BEHIND.match(text, _end(text, span))
    comma_below = behind and not behind["comma"] and re.compile(r"\s*,").match(text, behind.end())
    start = text.rfind("\n", 0, span.key) + 1
    comments: list[str] = []
    if behind is None or comma_below or start < gap_start or not _begins_line(text, span.key):
        cuts = _inline_cut(text, span, commas)
        remark = ""
    else:
        comments, start = _comments_above(text, between, gap_start, start)
        remark = behind["comment"] or ""
        cuts = [(start, behind.end(), "")]
        if not behind["comma"]:
            cuts += [(at, at + 1, "") for at in commas[-1:]]
    left = text[parent.opening + 1 : cuts[0][0]] + text[cuts[0][1] : parent.closing]
    if parent.opening >= 0 and not left.strip():
        cuts = [(parent.opening + 1, parent.closing, "")]
    return cuts, comments, remark


def _inline_cut(text: str, span: Span, commas: list[int]) -> list[Change]:
    behind = re.compile(r"\s*,[ \t]*").match(text, _end(text, span))
    if behind:
        return [(span.key, behind.end(), "")]
    return [(commas[-1] if commas else span.key, _end(text, span), "")]


def _comments_above(
    text: str, between: list[re.Match[str]], gap_start: int, start: int
) -> tuple[list[str], int]:
    """The comments on the lines right above a line that begins at `start`, and where they begin."""
    comments: list[str] = []
    for match in reversed(between):
        its_line = text.rfind("\n", 0, match.start()) + 1
        is_alone = its_line >= gap_start and _begins_line(text, match.start())
        if not match["comment"] or not is_alone or not _LINE_END.fullmatch(text, match.end(), start):
            break
        comments = [*_without_indent(match["comment"], _indent_at(text, match.start())), *comments]
        start = its_line
    return comments, start


def _insertion(
    text: str, target: Braces, member: Member, comma: str, unit: str, newline: str
) -> list[Change]:
    """What to put in where a member comes first in an object."""
    outer, opening = _indent_at(text, target.opening), target.opening
    first = target.members[0].key if target.members else None
    inner = outer + unit
    if first is not None and _begins_line(text, first):
        inner = _indent_at(text, first)
    comma = comma if target.members else ""
    lines = _BEHIND.match(text, opening + 1)
    if lines and not lines["comma"]:
        return [(lines.end(), lines.end(), member.text(inner, comma, newline) + newline)]
    blank = re.compile(r"\s*").match(text, opening + 1)
    at = blank.end() if blank else opening + 1
    if member.is_short and _is_on_one_line(text, target):
        # On one line only a comma parts members.
        between = f",{text[opening + 1 : at] or ' '}" if target.members else ""
        return [(at, at, member.lines[0] + between)]
    opened = newline + member.text(inner, comma, newline) + newline
    if first is None:
        return [(opening + 1, at, opened + outer)]
    changes: list[Change] = [(opening + 1, at, opened + inner)]
    rest = text[at : target.closing]
    if "\n" not in rest:
        changes.append((at + len(rest.rstrip()), target.closing, newline + outer))
    return changes


def _is_on_one_line(text: str, target: Braces) -> bool:
    if _BEHIND.match(text, target.opening + 1):
        return False
    # An empty object tells by where it stands.
    return bool(target.members) or not target.begins_line


def _changed(text: str, changes: list[Change]) -> str | None:
    pieces, done = [], 0
    for start, end, instead in sorted(changes):
        if start < done:
            return None
        pieces += [text[done:start], instead]
        done = end
    return "".join([*pieces, text[done:]])


def _braces(document: Document, pointer: str) -> Braces:
    text, spans = document.text, document.spans
    members = [span for other, span in spans.items() if other and other.rpartition("/")[0] == pointer]
    members.sort(key=lambda span: span.key)
    if pointer:
        span = spans[pointer]
        return Braces(span.value, _end(text, span) - 1, members, _begins_line(text, span.key))
    before = _BEFORE_ROOT.match(text)
    opening = before.end() if before else 0
    if text[opening : opening + 1] != "{":
        return Braces(-1, len(text), members, True)
    return Braces(opening, text.rfind("}"), members, True)


def _unit(document: Document) -> str:
    """One step of indentation, as the members of the whole document have it."""
    indents = [_indent_at(document.text, span.key) for span in _braces(document, "").members]
    return next((indent for indent in indents if indent), _USUAL_UNIT)


def _end(text: str, span: Span) -> int:
    return span.value + len(text[span.value : span.end].rstrip())


def _begins_line(text: str, offset: int) -> bool:
    return not text[text.rfind("\n", 0, offset) + 1 : offset].strip()


def _indent_at(text: str, offset: int) -> str:
    blank = _BLANK.match(text, text.rfind("\n", 0, offset) + 1)
    return blank[0] if blank else ""


def _without_indent(text: str, indent: str) -> list[str]:
    first, *others = re.split(r"\r?\n", text)
    return [first, *(line[len(indent) :] if line.startswith(indent) else line.lstrip() for line in others)]


def _indented(lines: list[str], indent: str) -> list[str]:
    return [indent + line if line.strip() else line for line in lines]


def _pointer(names: list[str]) -> str:
    return "".join(f"/{name}" for name in names)


def _name(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
