"""A pickle is data here, whatever it asks for."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.checkpoint import pickle_machine
from ds_toolkit.checkpoint.reductions import Inert, TensorRecord
from ds_toolkit.checkpoint.unpickle import unpickle
from ds_toolkit.errors import ToolkitError

PROTOCOLS = (2, 3, 4, 5)


class Calls:
    """Pickles as a call of any function."""

    def __init__(self, function: object, *arguments: object, state: object = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def torch_pickle(value: object) -> bytes:
    saved = io.BytesIO()
    torch.save(value, saved)
    return zipfile.ZipFile(saved).read("archive/data.pkl")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_not_made(tmp_path: Path, protocol: int) -> None:
    victim = tmp_path / "victim"
    bombs = [
        Calls(os.system, f"touch {victim}"),
        Calls(eval, f"open({str(victim)!r}, 'w')"),
        Calls(exec, f"open({str(victim)!r}, 'w')"),
        Calls(open, str(victim), "w"),
        Calls(os.mkdir, str(victim), state={"a": 1}),
    ]
    for bomb in bombs:
        value = unpickle(pickle.dumps({"nested": [(bomb,)]}, protocol), "a file")
        (inert,) = value["nested"][0]
        assert isinstance(inert, Inert)
        assert not victim.exists()


def test_a_constructor_is_not_called(tmp_path: Path) -> None:
    # NEWOBJ and BUILD, by which ordinary objects are pickled; Path is what a client_state may hold.
    value = unpickle(
        pickle.dumps({"path": Path("of/a/user"), "exact": collections.Counter("aab")}, 4), "a file"
    )
    assert isinstance(value["path"], Inert)
    assert value["path"].function.name == "PosixPath"
    assert isinstance(value["exact"], Inert)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_data_comes_back(protocol: int) -> None:
    data = {
        "numbers": [0, 1, -1, 255, 65536, -(2**31), 2**70, -(2**2100), 1.5, float("inf"), True, False, None],
        "texts": ["", "ascii", "\N{SNOWMAN}" * 300, b"", b"\x00\xff" * 300, bytearray(b"ab")],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "sets": [{1, 2}, frozenset({"a"}), set()],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "complex": 1 + 2j,
        1: {(1, "two"): 3},
    }
    if protocol < 5:
        del data["texts"][-1]  # a bytearray is a call before protocol 5
    back = unpickle(pickle.dumps(data, protocol), "a file")
    assert back == data
    assert list(back["ordered"]) == ["b", "a"]


def test_calls_with_unusual_arguments_stay_inert() -> None:
    back = unpickle(pickle.dumps([{(1, 2)}, bytearray(b"ab"), slice(1, 2)], 2), "a file")
    assert all(isinstance(value, Inert) for value in back)


def test_references_are_kept() -> None:
    shared: list[Any] = [1]
    shared.append(shared)
    back = unpickle(pickle.dumps([shared, shared], 2), "a file")
    assert back[0] is back[1]
    assert back[0][1] is back[0]


def test_tensors_become_records() -> None:
    base = torch.arange(24, dtype=torch.float32)
    value = {
        "view": base[4:16].view(3, 4).t(),
        "parameter": torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)),
        "scalar": torch.tensor(True),
        "dtype": torch.float16,
        "size": torch.Size([3, 4]),
    }
    back = unpickle(torch_pickle(value), "a file")
    view = back["view"]
    assert isinstance(view, TensorRecord)
    assert (view.shape, view.strides, view.storage_offset, view.dtype.name) == ((4, 3), (1, 4), 4, "float32")
    assert view.storage.num_elements == 24
    assert not view.is_contiguous
    assert (back["parameter"].dtype.name, back["parameter"].shape) == ("bfloat16", (2,))
    assert (back["scalar"].shape, back["scalar"].is_contiguous) == ((), True)
    assert back["dtype"].name == "float16"
    assert back["size"] == (3, 4)


def test_tensors_with_attributes_become_records() -> None:
    tensor = torch.zeros(3)
    tensor.note = "a user's"  # type: ignore[attr-defined]
    back = unpickle(torch_pickle(tensor), "a file")
    assert isinstance(back, TensorRecord)
    assert back.shape == (3,)


def tensor_pickle(storage_elements: int, offset: Any, shape: Any, strides: Any) -> bytes:
    """What torch would write for such a tensor if it could exist."""

    marker = Path("stands for the storage")

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            if value is marker:
                return ("storage", torch.FloatStorage, "0", "cpu", storage_elements)
            return None

    written = io.BytesIO()
    call = Calls(torch._utils._rebuild_tensor_v2, marker, offset, shape, strides, False, None)
    Pickler(written, 2).dump(call)
    return written.getvalue()


def test_a_tensor_fits_its_storage_exactly() -> None:
    assert unpickle(tensor_pickle(12, 2, (2, 5), (5, 1)), "a file").num_elements == 10


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (3, (2, 5), (5, 1)),
        (-1, (2,), (1,)),
        (0, (2, -5), (5, 1)),
        (0, (13,), (1,)),
        (0, (2, 2), (11, 1)),
        (0, (2**40, 2**40), (0, 0)),
        (0, (2,), (1, 1)),
        (0, (1.0,), (1,)),
        (0, (1,) * 65, (1,) * 65),
    ],
)
def test_a_tensor_that_cannot_be(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    if shape == (2**40, 2**40):
        # All elements the same one is possible; that many are refused where bytes are counted.
        assert not unpickle(tensor_pickle(12, offset, shape, strides), "a file").is_contiguous
        return
    with pytest.raises(ToolkitError, match="cannot be read"):
        unpickle(tensor_pickle(12, offset, shape, strides), "a file")


MEMO_BOMB = b"\x80\x02]r\xff\xff\xff\xff."
HUGE_STRING = b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"abc."
HUGE_BYTES = b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"abc."
NEGATIVE_LENGTH = b"\x80\x02\x8b" + struct.pack("<i", -5) + b"abc."


def test_memo_indices_cost_nothing() -> None:
    assert unpickle(MEMO_BOMB, "a file") == []


@pytest.mark.parametrize(
    "data",
    [
        HUGE_STRING,
        HUGE_BYTES,
        NEGATIVE_LENGTH,
        b"",
        b".",
        b"\x80\x02(.",
        b"\x80\x02N",
        b"\x80\x02h\x05.",
        b"\x80\x02a.",
        b"\x80\x02u.",
        b"\x80\x02}(K\x01u.",
        b"\x80\x02}]K\x01s.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02cos\nsystem",
        b"\x80\x02cos\nsystem\nK\x01R.",
        b"cos\nsystem\n(S'echo'\ntR.",
    ],
)
def test_damaged_pickles_are_refused(data: bytes) -> None:
    with pytest.raises(ToolkitError) as caught:
        unpickle(data, "the/file.pt")
    assert caught.value.where == "the/file.pt"


def test_deep_nesting_is_survived() -> None:
    depth = 200_000
    assert unpickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", "a file") is not None
    key = b"\x80\x02})" + b"\x85" * depth + b"K\x01s."
    with pytest.raises(ToolkitError, match="nested too deeply"):
        unpickle(key, "a file")
    chained = b"\x80\x02cos\nsystem\nq\x00)R" + b"\x85h\x00\x85R" * 10
    assert unpickle(chained + b".", "a file") is not None


def test_references_do_not_multiply() -> None:
    # A list of n sizes, and n calls that each copy all of it.
    many = b"(" + b"K\x01" * 50_000 + b"t\x85q\x01"
    calls = b"h\x00h\x01R" * 50_000
    bomb = b"\x80\x02(ctorch\nSize\nq\x00" + many + calls + b"t."
    with pytest.raises(ToolkitError, match="over and over"):
        unpickle(bomb, "a file")


@pytest.mark.parametrize("made", [b"]", b"}", b"\x8f", b"(t", b"N\x85", b"h\x00)R", b"h\x00)}\x92", b"(\x91"])
def test_a_small_pickle_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch, made: bytes) -> None:
    monkeypatch.setattr(pickle_machine, "_MAX_CONTAINERS", 1000)
    start = b"\x80\x02cos\nsystem\nq\x00"
    assert unpickle(start + made * 200 + b".", "file") is not None
    with pytest.raises(ToolkitError) as caught:
        unpickle(start + made * 1001 + b".", "file")
    assert caught.value.why == "its pickle is damaged: it makes absurdly many objects"


def test_cut_anywhere_it_is_damaged() -> None:
    data = torch_pickle({"weight": torch.zeros(3, 4), "path": Path("of/a/user"), "steps": 7})
    for length in range(len(data)):
        with pytest.raises(ToolkitError):
            unpickle(data[:length], "a file")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_data_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ToolkitError):
        unpickle(b"\x80\x02" + data + b".", "a file")


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_any_flipped_byte_is_data_or_an_error(position: int, byte: int) -> None:
    data = bytearray(torch_pickle({"a": torch.zeros(3), "b": [Path("x"), {1, 2}]}))
    data[position % len(data)] = byte
    with contextlib.suppress(ToolkitError):
        unpickle(bytes(data), "a file")
