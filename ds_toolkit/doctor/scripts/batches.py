"""DS103x: who gets which data, how much of it, and in which order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from ds_toolkit.doctor.scripts.names import argument, takes_unknown_keywords
from ds_toolkit.doctor.scripts.registry import at, rule
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem

_WRAPPERS = {"enumerate", "tqdm", "trange", "iter", "zip", "next", "track", "auto"}
_ENDLESS = {"RepeatingLoader", "cycle", "islice", "repeat", "count"}
_STEPS = {"backward", "step", "train_batch"}
_SEEDS = {"manual_seed", "seed", "seed_everything", "set_seed", "manual_seed_all"}
_SPLITTING = {
    "split_by_node",
    "split_dataset_by_node",
    "shard",
    "get_world_size",
    "world_size",
    "num_replicas",
}
_STREAMS = ("Iterable", "WebDataset", "webdataset", "StreamingDataset", "IterDataset")


@dataclass(frozen=True)
class Trained:
    """A DataLoader that a loop trains with.

    Attributes:
        loader: the call that makes it.
        loop: the loop that draws from it.
        is_counted: whether the loop itself, and not the loader's length, says when it ends.
    """

    loader: ast.Call
    loop: ast.AST
    is_counted: bool


@rule("DS1031", "loader-without-a-share", Severity.WARNING)
def loader_without_a_share(script: Script) -> Iterator[Problem]:
    """The engine trains with a `DataLoader` without a distributed sampler: every rank sees all data.

    An epoch takes as many steps as on one GPU, and without shuffling all ranks compute the same gradient.
    Nothing is said where the dataset is cut by rank, is a stream, or is shuffled by a seed of the rank.

    Bad:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for batch in torch.utils.data.DataLoader(dataset, batch_size=8):
            engine.backward(engine(batch))
            engine.step()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        sampler = torch.utils.data.DistributedSampler(dataset)
        for batch in torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler):
            engine.backward(engine(batch))
            engine.step()
    """
    seeded = any(_is_seeded_by_rank(script, call) for call in script.calls)
    for trained in _unique(_trained(script)):
        loader = trained.loader
        sampler = argument(loader, "sampler", 3) or argument(loader, "batch_sampler", 4)
        has_none = sampler is None or (isinstance(sampler, ast.Constant) and sampler.value is None)
        mixed = seeded or argument(loader, "generator") is not None
        if has_none and not mixed and not takes_unknown_keywords(loader) and not _shares(script, loader):
            fix = "give it sampler=DistributedSampler(dataset), or hand the dataset to initialize"
            yield at(loader, "every rank of this loader gets all the data", fix)


@rule("DS1032", "shares-of-other-lengths", Severity.WARNING)
def shares_of_other_lengths(script: Script) -> Iterator[Problem]:
    """A dataset is cut by rank, and nothing makes the parts equally long: the epoch ends on one rank first.

    The others wait in the next backward pass for ever. `DistributedSampler` pads to equal lengths;
    `drop_last=True` is taken for care here, and parts that are cut with `//` or `%` are taken for equal.

    Bad:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        part = samples[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
        for batch in torch.utils.data.DataLoader(part, batch_size=8):
            engine.backward(engine(batch))
            engine.step()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        part = samples[torch.distributed.get_rank() :: torch.distributed.get_world_size()]
        for batch in torch.utils.data.DataLoader(part, batch_size=8, drop_last=True):
            engine.backward(engine(batch))
            engine.step()
    """
    compared = any(True for _ in script.methods("check_even"))
    for trained in _unique(_trained(script)):
        loader = trained.loader
        dataset = argument(loader, "dataset", 0)
        if dataset is None or compared or trained.is_counted or takes_unknown_keywords(loader):
            continue
        drop = argument(loader, "drop_last", 8)
        keeps = drop is None or (isinstance(drop, ast.Constant) and drop.value is False)
        parts = _parts(script, dataset)
        is_cut = any(_is_cut_by_rank(script, part) for part in parts)
        is_even = any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.FloorDiv | ast.Mod) for part in parts
        )
        if keeps and is_cut and not is_even:
            fix = "write drop_last=True and cut all parts to the shortest, or use DistributedSampler"
            yield at(loader, "ranks get parts of different lengths: the longest waits for the others", fix)


@rule("DS1033", "epoch-not-set", Severity.WARNING)
def epoch_not_set(script: Script) -> Iterator[Problem]:
    """A `DistributedSampler` is never told the epoch: it shuffles every epoch into the same order.

    Bad:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        sampler = torch.utils.data.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(3):
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
    Good:
        engine, *_ = deepspeed.initialize(model=model, config=config)
        sampler = torch.utils.data.DistributedSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                engine.backward(engine(batch))
                engine.step()
    """
    if any(True for _ in script.methods("set_epoch")):
        return
    for trained in _unique(_trained(script)):
        given = argument(trained.loader, "sampler", 3)
        sampler = script.names.origin(given) if given is not None else None
        if not (isinstance(sampler, ast.Call) and _is_torch(script, sampler, "DistributedSampler")):
            continue
        shuffle = argument(sampler, "shuffle", 3)
        in_order = isinstance(shuffle, ast.Constant) and shuffle.value is False
        if not in_order and not takes_unknown_keywords(sampler) and _is_repeated(script, trained.loop):
            fix = "call sampler.set_epoch(epoch) at the start of each epoch"
            yield at(sampler, "every epoch comes in the same order", fix)


def _trained(script: Script) -> Iterator[Trained]:
    """The loaders that loops with an engine's backward or step draw from."""
    if not script.initializations:
        return
    for node in script.names.nodes:
        if isinstance(node, ast.For | ast.While) and _trains(script, node):
            drawn = [(node.iter, False)] if isinstance(node, ast.For) else []
            drawn += [
                (call.args[0], True) for call in _calls(node) if script.dotted(call) == "next" and call.args
            ]
            for value, is_counted in drawn:
                for loader, is_endless in _loaders(script, value, 8):
                    yield Trained(loader, node, is_endless or is_counted)


def _unique(found: Iterator[Trained]) -> list[Trained]:
    return list({id(trained.loader): trained for trained in found}.values())


def _trains(script: Script, loop: ast.AST, depth: int = 3) -> bool:
    for call in _calls(loop):
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in _STEPS
            and script.is_engine(call.func.value)
        ):
            return True
        called = script.names.definition(call) if depth else None
        if called is not None and _trains(script, called, depth - 1):
            return True
    return False


def _loaders(script: Script, node: ast.expr, depth: int) -> Iterator[tuple[ast.Call, bool]]:
    for value, index in script.names.origins(node):
        if not isinstance(value, ast.Call) or index is not None or not depth:
            continue
        last = script.dotted(value).rpartition(".")[2]
        if _is_torch(script, value, "DataLoader"):
            yield value, False
        elif last in _WRAPPERS | _ENDLESS:
            for inner in value.args:
                for loader, is_endless in _loaders(script, inner, depth - 1):
                    yield loader, is_endless or last in _ENDLESS


def _is_torch(script: Script, call: ast.Call, name: str) -> bool:
    dotted = script.dotted(call)
    return dotted.startswith("torch.utils.data") and dotted.endswith(f".{name}")


def _calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _parts(script: Script, node: ast.expr) -> list[ast.AST]:
    """All that an expression is made of: names followed, classes and functions of the script looked into."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = [node]
    seen: set[int] = set()
    while waiting and len(found) < 2000:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        found.append(part)
        if isinstance(part, ast.Name | ast.Attribute):
            waiting += [value for value, _ in script.names.origins(part)]
            waiting += [
                binding.node for binding in script.names.bindings(part) if _is_definition(binding.node)
            ]
        waiting += ast.iter_child_nodes(part)
    return found


def _is_definition(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef)


def _shares(script: Script, loader: ast.Call) -> bool:
    """Whether the dataset itself is a rank's share, or a stream, which no sampler can divide."""
    dataset = argument(loader, "dataset", 0)
    for part in _parts(script, dataset) if dataset is not None else []:
        word = part.attr if isinstance(part, ast.Attribute) else part.id if isinstance(part, ast.Name) else ""
        word = part.arg or "" if isinstance(part, ast.keyword) else word
        if word in _SPLITTING or word == "streaming" or any(mark in word for mark in _STREAMS):
            return True
        if isinstance(part, ast.expr) and script.ranks.is_rank(part):
            return True
        if isinstance(part, ast.Name) and any(
            binding.dotted and any(mark in binding.dotted for mark in _STREAMS)
            for binding in script.names.bindings(part)
        ):
            return True
    return False


def _is_cut_by_rank(script: Script, part: ast.AST) -> bool:
    """`samples[rank::world]`, `range(rank, ...)`, `Subset(..., by rank)`, `dataset.shard(world, rank)`."""
    if isinstance(part, ast.Slice):
        ends = [end for end in (part.lower, part.upper, part.step) if end is not None]
        return any(
            script.ranks.is_rank(inner)
            for end in ends
            for inner in ast.walk(end)
            if isinstance(inner, ast.expr)
        )
    if isinstance(part, ast.Call):
        last = part.func.attr if isinstance(part.func, ast.Attribute) else script.dotted(part)
        if last not in {"range", "shard", "split_dataset_by_node"}:
            return False
        given = [*part.args, *(keyword.value for keyword in part.keywords)]
        return any(script.ranks.is_rank(value) for value in given)
    return False


def _is_seeded_by_rank(script: Script, call: ast.Call) -> bool:
    last = call.func.attr if isinstance(call.func, ast.Attribute) else script.dotted(call)
    given = [inner for value in call.args for inner in _parts(script, value)] if last in _SEEDS else []
    return any(isinstance(inner, ast.expr) and script.ranks.is_rank(inner) for inner in given)


def _is_repeated(script: Script, loop: ast.AST, depth: int = 4) -> bool:
    """Whether a loop stands in another one, or in a function that is called in one: epochs."""
    for parent in script.names.above(loop):
        if isinstance(parent, ast.For):
            once = isinstance(parent.iter, ast.Call) and ast.unparse(parent.iter) == "range(1)"
            return not once
        if isinstance(parent, ast.While):
            return True
        if isinstance(parent, ast.FunctionDef):
            return bool(depth) and any(
                _is_repeated(script, call, depth - 1) for call in script.names.calls_of(parent)
            )
    return False
