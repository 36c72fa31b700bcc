"""Pickles of states that are almost the same: right at every step, and cheap where nothing moved."""

from __future__ import annotations

import copy
import enum
import io
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_toolkit.checkpoint.archive_layout import ArchiveLayout
from ds_toolkit.errors import ToolkitError
from ds_toolkit.resilience import leaves as leaves_module
from ds_toolkit.resilience.leaves import leaves
from ds_toolkit.resilience.slot_files import bytes_of
from ds_toolkit.resilience.state_pickle import Pickled, StatePickler


def loaded(pickled: Pickled, folder: Path) -> Any:
    """What torch makes of it, once the storages are where the layout wants them."""
    datas = [bytes(bytes_of(storage).tolist()) for storage in pickled.storages]
    layout = ArchiveLayout([len(data) for data in datas])
    out = io.BytesIO()
    for key, data in enumerate(datas):
        start, header = layout.header(key, zlib.crc32(data))
        out.seek(start)
        out.write(header + data)
    out.seek(layout.tail_offset_bytes)
    out.write(layout.tail(pickled.data))
    path = folder / "state.pt"
    path.write_bytes(out.getvalue())
    return torch.load(path, weights_only=False)


@dataclass
class Fragment:
    start: int


def state() -> dict[str, Any]:
    weight = torch.randn(4, 3)
    return {
        "module": OrderedDict(weight=weight, tied=weight, row=weight[1]),
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(12)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "frozen": weight,
        "fragments": [OrderedDict(a=Fragment(3))],
        "global_steps": 255,
        "empty": {},
        "none": None,
    }


def test_torch_reads_what_was_pickled(tmp_path: Path) -> None:
    value = state()
    found = loaded(StatePickler().pickle(value), tmp_path)
    assert list(found) == list(value)
    assert torch.equal(found["module"]["weight"], value["module"]["weight"])
    assert found["module"]["tied"].data_ptr() == found["module"]["weight"].data_ptr()
    # Shared between pieces, and in the file once.
    assert found["frozen"].data_ptr() == found["module"]["weight"].data_ptr()
    assert torch.equal(found["module"]["row"], value["module"]["row"])
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert found["fragments"][0]["a"] == Fragment(3)
    assert (found["global_steps"], found["empty"], found["none"]) == (255, {}, None)


def test_what_did_not_change_is_not_pickled_again() -> None:
    pickler, value = StatePickler(), state()
    assert pickler.pickle(value).is_new
    before = {place: piece.data for place, piece in pickler._memory.pieces.items()}
    value["global_steps"] = 256
    value["optimizer"]["state"][0]["exp_avg"].add_(1)
    again = pickler.pickle(value)
    assert not again.is_new
    assert not again.replaced
    changed = {place for place, piece in pickler._memory.pieces.items() if piece.data is not before[place]}
    assert changed == {("global_steps",)}


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["optimizer"]["param_groups"][0].update(lr=0.2),
        lambda value: value["optimizer"]["param_groups"][0].update(lr=1),
        lambda value: value["fragments"][0].update(a=Fragment(4)),
        lambda value: value["optimizer"]["state"][0].update(step=torch.tensor(2.0)),
        lambda value: value["optimizer"]["state"][0].update(exp_avg=torch.ones(24)),
        lambda value: value["optimizer"]["state"].update({1: {"exp_avg": torch.ones(2)}}),
        lambda value: value["module"].update(weight=torch.ones(4, 3)),
        lambda value: value["module"].update(row=value["module"]["weight"][2]),
        lambda value: value["module"].update(weight=value["module"]["weight"].t()),
        lambda value: value.update(none=torch.ones(5)),
        lambda value: value.update(frozen=None),
        lambda value: value.update(empty={"a": 1}),
        lambda value: value.pop("none"),
    ],
)
def test_whatever_changes_is_noticed(tmp_path: Path, change: Any) -> None:
    pickler, value = StatePickler(), state()
    pickler.pickle(value)
    change(value)
    mine = loaded(pickler.pickle(value), tmp_path)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    assert repr(mine) == repr(torch.load(buffer, weights_only=False))


def test_a_storage_made_anew_takes_the_place_of_the_old_one() -> None:
    """As random states do at every step."""
    pickler = StatePickler()
    value = {"random": {"torch": torch.get_rng_state()}, "weight": torch.ones(3)}
    first = pickler.pickle(value)
    sizes = [storage.nbytes() for storage in first.storages]
    for _ in range(5):
        torch.rand(1)
        value["random"]["torch"] = torch.get_rng_state()
        again = pickler.pickle(value)
        assert not again.is_new
        assert again.replaced == {0}
        assert [storage.nbytes() for storage in again.storages] == sizes
        assert again.storages[0].data_ptr() == value["random"]["torch"].untyped_storage().data_ptr()


def test_numbers_of_other_types_are_told_apart() -> None:
    pickler = StatePickler()
    datas = {pickler.pickle({"value": value}).data for value in (1, 1.0, True)}
    assert len(datas) == 3
    assert pickler.pickle({"value": 0.0}).data != pickler.pickle({"value": -0.0}).data
    assert pickler.pickle({"value": {"a": [True]}}).data != pickler.pickle({"value": {"a": [1]}}).data
    assert pickler.pickle({"value": {1: None}}).data != pickler.pickle({"value": {True: None}}).data


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


def looped(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"depth": depth}
    inner["again"] = [inner]
    return inner


@pytest.mark.parametrize(
    ("value", "changed", "is_told_apart"),
    [
        (Fragment(1), Fragment(2), True),
        (Mode.ONE, Mode.TWO, True),
        (torch.Size((2, 3)), (2, 3), True),
        ([torch.Size((2, 3))], [torch.Size((3, 2))], True),
        (torch.nn.BatchNorm1d(2).state_dict(), torch.nn.Linear(2, 2).state_dict(), True),
        (complex(1, 0.0), complex(1, -0.0), True),
        ({"deep": {0: [(1, 2)]}}, {"deep": {0: [(1, 3)]}}, True),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), False),
        (torch.ones(2).to_sparse(), torch.zeros(2).to_sparse(), False),
        ({0.5: 1}, {-0.5: 1}, False),
        (looped(1), looped(2), False),
        ([[], {}, ()], [[], (), {}], True),
        ([[1], []], [[], [1]], True),
        ({"a": {"b": [0.0]}, "c": [{}]}, {"a": {"b": [-0.0]}, "c": [{}]}, True),
    ],
)
def test_leaves_tell_states_apart_or_say_that_they_do_not(
    value: Any, changed: Any, is_told_apart: bool
) -> None:
    if is_told_apart:
        assert leaves(value) == leaves(copy.deepcopy(value)) or isinstance(value, dict)
        assert leaves(value) != leaves(changed)
    else:
        assert leaves(value) is None


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "moved": lambda tensor: setattr(tensor, "data", tensor.data.clone()),
    "shifted": lambda tensor: setattr(tensor, "data", tensor.data.view(-1)[4:12].view(2, 4)),
    "transposed": lambda tensor: tensor.t_(),
    "shortened": lambda tensor: tensor.resize_(1, 4),
    "of another type": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "trained": lambda tensor: tensor.requires_grad_(True),
}


@pytest.mark.parametrize("num_looks", [0, 1, 3])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_happens_to_a_tensor_in_its_place_is_seen(
    change: Callable[[torch.Tensor], object], num_looks: int
) -> None:
    """However often it was found to be as it was: torch itself compares then."""
    tensors = [torch.zeros(4, 4) for _ in range(3)]
    before = leaves({"a": tensors})
    for _ in range(num_looks):
        assert before == leaves({"a": tensors}, to_compare=True)
    change(tensors[1])
    assert before != leaves({"a": tensors}, to_compare=True)


def test_a_tensor_more_or_less_is_seen() -> None:
    tensors = [torch.zeros(2) for _ in range(3)]
    before = leaves(tensors)
    assert before == leaves(tensors, to_compare=True)
    assert before != leaves(tensors[:2], to_compare=True)
    assert before != leaves([*tensors, tensors[0]], to_compare=True)
    assert before != leaves([*tensors[:2], torch.zeros(2).to_sparse()], to_compare=True)


@pytest.mark.parametrize("missing", ["guard", "agreement"])
def test_where_torch_compares_nothing_each_tensor_is_asked(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "guard":
        monkeypatch.setattr(leaves_module, "TensorGuards", None)
    # One that stands there twice is none that torch compares.
    weight = torch.zeros(2, 3)
    tensors = [weight, weight]
    before = leaves(tensors)
    for _ in range(3):
        assert before == leaves(tensors, to_compare=True)
    weight.t_()
    assert before != leaves(tensors, to_compare=True)


def test_a_layer_of_another_version_is_told_apart() -> None:
    layer = torch.nn.BatchNorm1d(2).state_dict()
    before = leaves(layer)
    assert leaves(layer) == before
    layer._metadata[""]["version"] = 3  # type: ignore[attr-defined]
    assert leaves(layer) != before


def test_a_storage_that_grew_in_its_place_is_not_taken_for_the_last_one(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    pickler = StatePickler()
    pickler.pickle({"weight": weight, "step": 1})
    weight.resize_(8).fill_(2)
    pickled = pickler.pickle({"weight": weight, "step": 2})
    assert pickled.is_new
    assert loaded(pickled, tmp_path)["weight"].tolist() == [2] * 8


def test_what_is_said_to_be_unchanged_is_not_looked_at() -> None:
    pickler, value = StatePickler(), state()
    first = pickler.pickle(value).data
    value["fragments"][0]["a"] = Fragment(4)
    assert pickler.pickle(value, unchanged={"fragments"}).data == first
    assert pickler.pickle(value).data != first


def test_a_dict_of_another_kind_stays_one(tmp_path: Path) -> None:
    layer = torch.nn.BatchNorm1d(2).state_dict()
    pickler = StatePickler()
    pickler.pickle(layer)
    found = loaded(pickler.pickle(layer), tmp_path)
    assert type(found) is OrderedDict
    assert found._metadata == layer._metadata  # type: ignore[attr-defined]


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(ToolkitError, match="cannot be pickled") as caught:
        StatePickler().pickle({"mine": {"hook": lambda: None}})
    assert caught.value.where == "mine.hook"


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.integers(0, 3).map(lambda size: torch.arange(size)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(states=st.lists(st.dictionaries(st.text(max_size=2), _VALUES, max_size=4), min_size=1, max_size=4))
def test_any_row_of_states_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, states: list[dict[str, Any]]
) -> None:
    folder, pickler = tmp_path_factory.mktemp("states"), StatePickler()
    for value in states:
        assert repr(loaded(pickler.pickle(value), folder)) == repr(value)
