"""Members that are moved to another object: content as wanted, and the look of a text written that way."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.config.fixes import apply_edit, apply_fixes
from ds_toolkit.config.linter import lint
from ds_toolkit.config.reader import read_config_text
from ds_toolkit.findings import Edit

KEYS = st.sampled_from(["a", "b", "c/d", "e~f", "g"])
LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, "x", "a # b", "}", []])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.dictionaries(KEYS, inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=12,
)
OBJECTS = st.dictionaries(KEYS, TREES, min_size=2, max_size=5)


def objects_in(data: dict[str, Any], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [objects_in(value, (*path, key)) for key, value in data.items() if isinstance(value, dict)]
    return [path, *itertools.chain(*inner)]


def at(data: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


def pointer(path: tuple[str, ...]) -> str:
    return "".join("/" + key.replace("~", "~0").replace("/", "~1") for key in path)


@st.composite
def moves(draw: st.DrawFn) -> tuple[dict[str, Any], Edit, dict[str, Any]]:
    """Data, a move of one member into another object or a new one, and what the data is to be."""
    data = draw(OBJECTS)
    objects = objects_in(data)
    source = draw(st.sampled_from([path for path in objects if at(data, path)]))
    member = (*source, draw(st.sampled_from(sorted(at(data, source)))))
    targets = [path for path in objects if path[: len(member)] != member and path != source]
    new = [(*path, "new") for path in [*targets, source]]
    target = draw(st.sampled_from([*targets, *new]))
    wanted = copy.deepcopy(data)
    name, parent = "moved", at(wanted, source)
    if target[:-1] == source and target in new:
        # The new object takes the place of the member.
        items = [("new", {name: old}) if key == member[-1] else (key, old) for key, old in parent.items()]
        parent.clear()
        parent.update(items)
        return data, Edit(pointer(member), key=name, section=pointer(target)), wanted
    value = parent.pop(member[-1])
    if target in new:
        put_first(at(wanted, target[:-1]), "new", {name: value})
    else:
        put_first(at(wanted, target), name, value)
    return data, Edit(pointer(member), key=name, section=pointer(target)), wanted


def put_first(place: dict[str, Any], key: str, value: Any) -> None:
    items = list(place.items())
    place.clear()
    place.update([(key, value), *items])


@settings(max_examples=400, deadline=None)
@given(moves(), st.sampled_from([1, 2, 4, "\t"]), st.sampled_from(["\n", "\r\n"]))
def test_indented_json_is_what_it_would_be_if_it_had_been_written_so(
    move: tuple[dict[str, Any], Edit, dict[str, Any]], indent: int | str, newline: str
) -> None:
    data, edit, wanted = move
    text = json.dumps(data, indent=indent).replace("\n", newline)
    edited = apply_edit(read_config_text(text), edit)
    assert edited is not None
    assert edited.text == json.dumps(wanted, indent=indent).replace("\n", newline)


@settings(max_examples=200, deadline=None)
@given(moves(), st.sampled_from([None, (",", ":")]))
def test_json_on_one_line_stays_json_on_one_line(
    move: tuple[dict[str, Any], Edit, dict[str, Any]], separators: tuple[str, str] | None
) -> None:
    data, edit, wanted = move
    edited = apply_edit(read_config_text(json.dumps(data, separators=separators)), edit)
    assert edited is not None
    assert json.loads(edited.text) == wanted
    assert "\n" not in edited.text


def as_hjson(data: dict[str, Any], comma: str, depth: int = 1, path: tuple[str, ...] = ()) -> str:
    """Members on lines of their own, each with comments above and behind that tell where it was."""
    lines = ["{ # in " + pointer(path)]
    for number, (key, value) in enumerate(data.items()):
        place = pointer((*path, key))
        mark = comma if number < len(data) - 1 else ""
        written = json.dumps(value)
        if isinstance(value, dict) and value:
            written = as_hjson(value, comma, depth + 1, (*path, key))
        name = key if key.isalpha() else json.dumps(key)
        lines += [f"{'  ' * depth}// above {place}.", f"{'  ' * depth}/* and", f"{'  ' * depth}   so on */"]
        lines.append(f"{'  ' * depth}{name}: {written}{mark} # behind {place}.")
    return "\n".join([*lines, "  " * (depth - 1) + "}"])


@settings(max_examples=300, deadline=None)
@given(moves(), st.sampled_from([",", ""]))
def test_comments_go_where_their_member_goes(
    move: tuple[dict[str, Any], Edit, dict[str, Any]], comma: str
) -> None:
    data, edit, wanted = move
    before = as_hjson(data, comma)
    edited = apply_edit(read_config_text(before), edit)
    assert edited is not None
    assert edited.data == wanted
    assert sorted(re.findall(r"(?:above|behind|in) \S*", edited.text)) == sorted(
        re.findall(r"(?:above|behind|in) \S*", before)
    )
    # The comments of the member that was moved stand with it, or with the new object that took its place.
    lines = edited.text.splitlines()
    above = next(number for number, line in enumerate(lines) if f"above {edit.pointer}." in line)
    assert re.match(r'\s*"(moved|new)": ', lines[above + 3])
    for place, span in edited.spans.items():
        line = edited.text[edited.text.rfind("\n", 0, span.key) + 1 : span.key]
        assert line.strip() or line == "  " * place.count("/")


def fixed(text: str) -> str:
    document = read_config_text(text)
    return apply_fixes(document, lint(document))[0].text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            """{
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 3
    },
    "offload_param": {
        "device": "cpu",
        "pin_memory": true
    }
}
""",
            """{
    "train_batch_size": 8,
    "zero_optimization": {
        "offload_param": {
            "device": "cpu",
            "pin_memory": true
        },
        "stage": 3
    }
}
""",
        ),
        (
            """{
  train_batch_size: 8

  # Weights go to the host:
  # 40 GB of it
  offload_param: {
    device: cpu
    nvme_path: /local # scratch
  } # for now
  zero_optimization: { // three
    stage: 3
  }
}
""",
            """{
  train_batch_size: 8

  zero_optimization: { // three
    # Weights go to the host:
    # 40 GB of it
    offload_param: {
      device: cpu
      nvme_path: /local # scratch
    } # for now
    stage: 3
  }
}
""",
        ),
        # An object on one line is opened for a member of several.
        (
            '{\n  "zero_optimization": {"stage": 3},\n  "offload_param": {\n    "device": "cpu"\n  }\n}',
            '{\n  "zero_optimization": {\n    "offload_param": {\n      "device": "cpu"\n    },\n'
            '    "stage": 3\n  }\n}',
        ),
        (
            "// ours\n"
            '{"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 1, "max_grad_norm": 2}}}',
            "// ours\n"
            '{"gradient_clipping": 2, "train_batch_size": 8, "optimizer": {"type": "SGD", "params": '
            '{"lr": 1}}}',
        ),
        # Commas at the beginnings of lines, and an object without its outer brackets.
        (
            '{\n  "offload_param": {"device": "cpu"}\n, "zero_optimization": {\n    "stage": 3\n  }\n}',
            '{\n  "zero_optimization": {\n    "offload_param": {"device": "cpu"},\n    "stage": 3\n  }\n}',
        ),
        (
            "{\n  zero_optimization: { # none yet\n  }, # soon\n  offload_param: {device: 'cpu'}\n}",
            "{\n  zero_optimization: { # none yet\n    offload_param: {device: 'cpu'}\n  } # soon\n}",
        ),
        (
            "zero_optimization: {\n  stage: 3\n}\noffload_param: {\n  device: cpu\n}",
            "zero_optimization: {\n  offload_param: {\n    device: cpu\n  }\n  stage: 3\n}\n",
        ),
    ],
    ids=["JSON", "HJSON", "one line", "to the top", "commas first", "into nothing", "no outer brackets"],
)
def test_misplaced_members_read_as_if_they_had_been_there(before: str, after: str) -> None:
    assert fixed(before) == after
