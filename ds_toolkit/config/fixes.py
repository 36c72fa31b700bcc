"""Edits that findings carry, applied to the text so that everything else in it stays as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ds_toolkit.config.moves import moved_text, separators
from ds_toolkit.config.reader import Document, read_config_text
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import UNCHANGED, Edit, Finding


def apply_fixes(document: Document, findings: Iterable[Finding]) -> tuple[Document, list[Finding]]:
    """The document with every safe edit made, and the findings that were mended by them.

    An edit whose text cannot be proved to mean what the edit says (an unusual HJSON spelling) is left out.
    """
    mended = []
    for finding in findings:
        if finding.edit is not None and (edited := apply_edit(document, finding.edit)) is not None:
            document = edited
            mended.append(finding)
    return document, mended


def apply_edit(document: Document, edit: Edit) -> Document | None:
    """The document with one member changed; None where that cannot be done safely."""
    try:
        wanted = _edited_data(document.data, edit)
    except RecursionError:
        return None
    for text in _edited_texts(document, edit) if wanted is not None else ():
        try:
            edited = read_config_text(text, document.file)
        except ToolkitError:
            continue
        if edited.data == wanted and not edited.repeated:
            return edited
    return None


def _edited_data(data: dict[str, Any], edit: Edit) -> dict[str, Any] | None:
    data = copy.deepcopy(data)
    parent_pointer, _, key = edit.pointer.rpartition("/")
    parent, target = _object_at(data, parent_pointer), None
    key = _unescape(key)
    if parent is None or key not in parent:
        return None
    value = parent[key] if edit.value is UNCHANGED else edit.value
    new_key = edit.key or key
    if edit.section is None:
        if new_key != key and new_key in parent:
            return None
        items = [(new_key, value) if name == key else (name, old) for name, old in parent.items()]
        parent.clear()
        parent.update(items)
        return data
    del parent[key]
    target = data
    for part in map(_unescape, edit.section.split("/")[1:]):
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            return None
    if new_key in target:
        return None
    target[new_key] = value
    return data


def _edited_texts(document: Document, edit: Edit) -> Iterator[str]:
    """What the text may have to be, the likeliest first."""
    text, span = document.text, document.spans[edit.pointer]
    old_key = _unescape(edit.pointer.rpartition("/")[2])
    quoted = text[span.key] in "\"'"
    key_end = span.key + len(old_key) + (2 if quoted else 0)
    if span.key == span.value or text[span.key + quoted : key_end - quoted] != old_key:
        return
    value_end = span.value + len(text[span.value : span.end].rstrip())
    new_key = json.dumps(edit.key) if edit.key else text[span.key : key_end]
    new_value = text[span.value : value_end] if edit.value is UNCHANGED else json.dumps(edit.value)
    member = new_key + text[key_end : span.value] + new_value
    if edit.section is None:
        yield text[: span.key] + member + text[value_end:]
        return
    for comma in separators(document):
        if (moved := moved_text(document, edit.pointer, member, edit.section, comma)) is not None:
            yield moved


def _object_at(data: dict[str, Any], pointer: str) -> dict[str, Any] | None:
    value: Any = data
    for part in pointer.split("/")[1:]:
        value = value.get(_unescape(part)) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else None


def _unescape(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
