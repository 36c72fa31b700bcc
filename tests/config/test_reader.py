from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.config.reader import MAX_BYTES, read_config, read_config_text
from ds_toolkit.config.subject import json_pointer
from ds_toolkit.errors import ToolkitError

HJSON = """{
  // how much
  "train_batch_size": 8, # of all ranks
  fp16: {
    'enabled': true,
  }
  "odd/~key": [1, {"x": null}]
}
"""

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


def test_hjson_is_read_with_the_place_of_everything() -> None:
    document = read_config_text(HJSON, "ds.hjson")
    assert document.data == {
        "train_batch_size": 8,
        "fp16": {"enabled": True},
        "odd/~key": [1, {"x": None}],
    }
    places = {
        "/train_batch_size": (3, 3),
        "/fp16": (4, 3),
        "/fp16/enabled": (5, 5),
        "/odd~1~0key": (7, 3),
        "/odd~1~0key/0": (7, 16),
        "/odd~1~0key/1/x": (7, 20),
        "": (1, 1),
    }
    for pointer, place in places.items():
        where = document.where(pointer)
        assert (where.file, where.pointer, where.line, where.column) == ("ds.hjson", pointer, *place)


def test_what_does_not_exist_is_placed_at_what_is_around_it() -> None:
    where = read_config_text(HJSON).where("/fp16/loss_scale")
    assert (where.pointer, where.line, where.column) == ("/fp16/loss_scale", 4, 3)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), st.sampled_from([None, 2]))
def test_json_means_what_json_says_and_every_key_is_found(
    data: dict[str, object], indent: int | None
) -> None:
    text = json.dumps(data, indent=indent)
    document = read_config_text(text)
    assert document.data == data
    lines = text.splitlines()
    for key in data:
        where = document.where(json_pointer(key))
        assert where.line is not None
        assert where.column is not None
        rest = lines[where.line - 1][where.column - 1 :]
        # A key written with escapes is placed at its value.
        if json.dumps(key) == f'"{key}"':
            assert rest.startswith(json.dumps(key))


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ('{"a" 1}', "1:6", "Expecting ':' delimiter; found '1'"),
        ('{"a": [1,', "1:10", "found the end of the text"),
        ('{"a": 1} x', "1:10", "Extra data"),
        ("[1]", "1:1", "expected an object `{...}`, found list"),
        ('"a"', "1:1", "found str"),
        ("/* no end", "1:1", "has no end"),
        ('{"a": 1e999}', "1:1", "out of range"),
        ('{"a":' * 5000, "1:1", "nested too deeply"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str, says: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        read_config_text(text, "f.json")
    assert caught.value.where == f"f.json:{place}"
    assert says in str(caught.value)


@settings(deadline=None)
@given(st.text(alphabet="{}[]:,\"'/*#\n ae1.-tru", max_size=40))
def test_no_text_makes_the_reader_crash(text: str) -> None:
    with contextlib.suppress(ToolkitError):
        assert isinstance(read_config_text(text).data, dict)


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ('{"a": 1,\n "a": 2}', [("/a", "2:2")]),
        ('{"b": {"c": 1, "c": 1}}', [("/b/c", "1:16")]),
        ('[{"b": 1, "b": 2, "b": 2}]', [("/0/b", "1:11"), ("/0/b", "1:19")]),
        ('{"a": {"b": 1}, "c": {"b": 1}}', []),
    ],
)
def test_keys_that_stand_twice_are_noted_with_their_places(
    text: str, repeated: list[tuple[str, str]]
) -> None:
    inside = text if text.startswith("{") else f'{{"x": {text}}}'
    shift = 0 if inside == text else len('{"x": ')
    document = read_config_text(inside)
    noted = [(pointer, document.at(pointer, offset)) for pointer, offset in document.repeated]
    prefix = "/x" if shift else ""
    assert [(pointer, f"{place.line}:{(place.column or 0) - shift}") for pointer, place in noted] == [
        (prefix + pointer, place) for pointer, place in repeated
    ]


def test_spans_hold_keys_and_values() -> None:
    document = read_config_text(HJSON)
    for pointer, key, value in (
        ("/train_batch_size", '"train_batch_size"', "8"),
        ("/fp16/enabled", "'enabled'", "true"),
        ("/odd~1~0key/1", '{"x": null}', '{"x": null}'),
    ):
        span = document.spans[pointer]
        assert document.text[span.key :].startswith(key)
        assert document.text[span.value : span.end].strip() == value


def test_words_without_quotes_and_json_proper() -> None:
    document = read_config_text("{\n a: cpu, b: 1\n c: true\n d: 1.5e3\n e: 'x'\n}")
    assert document.data == {"a": "cpu, b: 1", "c": True, "d": 1500, "e": "x"}
    assert list(document.bare_words()) == [("/a", "cpu, b: 1")]
    assert not document.is_json
    assert read_config_text('{"a": [1, true, null, "x", {}]}').is_json
    assert list(read_config_text('{"a": [1, true, null, "x", {}]}').bare_words()) == []


def test_an_empty_file_is_an_empty_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("")
    assert read_config(tmp_path / "c.json").data == {}


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "c.json"
    binary.write_bytes(b"{\xff")
    with pytest.raises(ToolkitError, match="not text"):
        read_config(binary)
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_config(tmp_path)
    with pytest.raises(ToolkitError, match="cannot be read"):
        read_config(tmp_path / "missing.json")
    with binary.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(ToolkitError, match="too long"):
        read_config(binary)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    where = read_config(tmp_path / "c.json").where("/a")
    assert (where.line, where.column) == (1, 2)


@pytest.mark.parametrize("text", ["a: 1\nb: 2", "a: 'x'", "enabled: true\nfp16: {enabled: true}"])
def test_keys_without_braces_begin_where_they_stand(text: str) -> None:
    document = read_config_text(text)
    where = document.where(json_pointer(next(iter(document.data))))
    assert (where.line, where.column) == (1, 1)


@settings(deadline=None, max_examples=500)
@given(st.text(alphabet="{}[]:,\"'/*#\n ab1.-t", max_size=30))
def test_every_place_is_in_the_text(text: str) -> None:
    with contextlib.suppress(ToolkitError):
        document = read_config_text(text)
        lines = text.split("\n")
        for pointer in document.spans:
            where = document.where(pointer)
            assert 1 <= (where.line or 0) <= len(lines)
            assert 1 <= (where.column or 0) <= len(lines[(where.line or 0) - 1]) + 1


@pytest.mark.parametrize(
    ("text", "place", "fix"),
    [
        ('{"offload_param": { device: cpu, pin_memory: true } }', "1:29", 'put quotes around it: "cpu"'),
        ('{"fp16": {"enabled": True}}', "1:22", "write true"),
        ('{"fp16": {"enabled": False}, "a": 1}\n', "1:22", "write false"),
        ('{\n "a": None}', "2:7", "write null"),
        ('{"a": [cpu, gpu]}', "1:8", 'put quotes around it: "cpu"'),
    ],
)
def test_a_text_that_takes_closing_brackets_is_what_is_pointed_at(text: str, place: str, fix: str) -> None:
    with pytest.raises(ToolkitError, match="takes the rest of its line") as caught:
        read_config_text(text, "f.json")
    assert caught.value.where == f"f.json:{place}"
    assert caught.value.fix == fix


def test_a_text_with_brackets_of_its_own_is_not_what_is_pointed_at() -> None:
    with pytest.raises(ToolkitError, match="neither JSON nor HJSON") as caught:
        read_config_text("{\n _note: runs/{name}[1]\n b 1\n}", "f.json")
    assert (caught.value.where or "").startswith("f.json:")
    assert "runs" not in str(caught.value)
