"""A training script as the rules see it: calls by full names, engines, and what is known of the config."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ds_toolkit.doctor.scripts.known_config import ConfigFinder, KnownConfig
from ds_toolkit.doctor.scripts.names import Names, argument
from ds_toolkit.doctor.scripts.ranks import Ranks
from ds_toolkit.doctor.scripts.source import Source

_ENGINE = re.compile(r"(model_?|ds_|deepspeed_|train_|pipe_|_)?engine")
_INITIALIZE = "deepspeed.initialize"
_ENGINE_MAKERS = {_INITIALIZE, "deepspeed.init_inference"}


class Script:
    """The subject of the rules.

    Attributes:
        tree: the syntax tree.
        names: scopes and aliases.
        ranks: what differs from rank to rank.
        calls: all calls in the order of the text.
    """

    def __init__(self, source: Source, folder: Path | None = None, config: KnownConfig | None = None) -> None:
        self.tree = source.tree
        self.names = Names(source.tree)
        self.ranks = Ranks(self.names)
        self.calls = [node for node in self.names.nodes if isinstance(node, ast.Call)]
        self._folder = folder
        self._given = config

    @cached_property
    def imported(self) -> frozenset[str]:
        """The roots of all imported modules."""
        found: set[str] = set()
        for node in self.names.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        return frozenset(found | {name.partition(".")[0] for name in found})

    @property
    def knows_deepspeed(self) -> bool:
        """Whether it imports DeepSpeed, so that an `engine` in it is DeepSpeed's."""
        return "deepspeed" in self.imported

    @property
    def is_distributed(self) -> bool:
        """Whether it is for several processes, as far as its imports and calls say."""
        ours = {"deepspeed", "torch.distributed", "torch.distributed.run"} & self.imported
        return bool(ours) or any(self.dotted(call).startswith("torch.distributed.") for call in self.calls)

    @cached_property
    def initializations(self) -> list[ast.Call]:
        """The calls of `deepspeed.initialize`."""
        return self.calls_named(_INITIALIZE)

    @cached_property
    def config(self) -> KnownConfig:
        """What is known of the ds_config: as it was given, or as all engines of the script have it."""
        if self._given is not None:
            return self._given
        finder = ConfigFinder(self.names, self._folder)
        found = [finder.find(node) for node in self._config_arguments()]
        stages, halves = {known.stage for known in found}, {known.fp16 for known in found}
        return KnownConfig(
            stages.pop() if len(stages) == 1 else None, halves.pop() if len(halves) == 1 else None
        )

    def _config_arguments(self) -> Iterator[ast.expr]:
        for call in self.initializations:
            for name, place in (("config", 10), ("config_params", 12)):
                value = argument(call, name, place)
                if value is not None:
                    yield value
        if not self.initializations:
            for call in self.calls:
                if self.dotted(call).rpartition(".")[2] == "HfDeepSpeedConfig" and call.args:
                    yield call.args[0]

    def dotted(self, call: ast.Call) -> str:
        """The full name of what a call calls."""
        return self.names.dotted(call.func)

    def calls_named(self, *dotted: str) -> list[ast.Call]:
        """The calls of one of these."""
        return [call for call in self.calls if self.dotted(call) in dotted]

    def methods(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Calls of an attribute of one of these names, each with what it is called on."""
        for call in self.calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr in names:
                yield call, call.func.value

    def is_engine(self, node: ast.expr) -> bool:
        """Whether an expression is what `deepspeed.initialize` returned first."""
        reached = self.names.origins(node)
        if any(self._is_made(value, index, 0) for value, index in reached):
            return True
        unknown = all(index is None and not isinstance(value, ast.Call) for value, index in reached)
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return unknown and self.knows_deepspeed and bool(_ENGINE.fullmatch(name))

    def is_returned(self, node: ast.expr, index: int) -> bool:
        """Whether an expression is the element of that index of what `deepspeed.initialize` returned."""
        return any(self._is_made(value, found, index) for value, found in self.names.origins(node))

    def _is_made(self, value: ast.expr, found: int | None, index: int) -> bool:
        if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Constant):
            found, value = value.slice.value if isinstance(value.slice.value, int) else None, value.value
            value = self.names.origin(value)
        return found == index and isinstance(value, ast.Call) and self.dotted(value) in _ENGINE_MAKERS

    def is_given(self, node: ast.expr, name: str, place: int | None = None) -> bool:
        """Whether an expression is the object that `deepspeed.initialize` gets as this argument."""
        meant = self._identities(node)
        for call in self.initializations:
            given = argument(call, name, place)
            if given is not None and meant & self._identities(given):
                return True
        return False

    def _identities(self, node: ast.expr) -> set[object]:
        """What an expression may be, so that two of the same object have one in common."""
        found: set[object] = set()
        for value, index in self.names.origins(node):
            if isinstance(value, ast.Name | ast.Attribute):
                # Nobody knows what made it: the name in its scope stands for it.
                found.add((ast.unparse(value), *(id(each.node) for each in self.names.bindings(value))))
            elif isinstance(value, ast.Call):
                found.add((id(value), index))
        return found

    def is_model(self, node: ast.expr) -> bool:
        """Whether an expression is the model of an engine: given to it, or its `module`."""
        made = self.names.origin(node)
        if isinstance(made, ast.Attribute) and made.attr == "module":
            return self.is_engine(made.value) or self.is_given(made.value, "model", 1)
        return self.is_engine(node) or self.is_given(node, "model", 1)
