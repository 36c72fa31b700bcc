"""Calls that every rank must make, else some wait for ever: collectives, and what holds some inside."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

from ds_toolkit.doctor.scripts.names import Function, argument, end, start
from ds_toolkit.doctor.scripts.ranks import Branch
from ds_toolkit.doctor.scripts.script import Script

_GROUPS = ("torch.distributed.", "deepspeed.comm.", "deepspeed.dist.")
_COLLECTIVES = {
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object"),
    *("gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor"),
    *(
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "monitored_barrier",
        "broadcast_object_list",
        "new_group",
    ),
}
_SAVES = {"save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model"}
_SAVES_INSIDE = {"_zero3_consolidated_16bit_state_dict"}
_STEPS = {"backward", "step", "train_batch", "eval_batch"}
_FULL = ("safe_get_full_", "safe_set_full_")
_GUARD = "CheckpointGuard"
_OF_GUARD = {"save", "resume", "close"}


@dataclass(frozen=True)
class Meeting:
    """A call at which ranks wait for each other.

    Attributes:
        call: where.
        name: as it is written: `engine.save_checkpoint`.
        kind: what must have its counterpart on the other ranks: `save_checkpoint`.
        saves: whether it is about a checkpoint.
        through: the function of the script that is called here and makes the call.
    """

    call: ast.Call
    name: str
    kind: str
    saves: bool
    through: str | None = None


class Meetings:
    """All such calls of a script, and what stands on the other ranks' side of each."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._inside: dict[ast.AST, list[Meeting]] = {}

    @cached_property
    def all(self) -> list[Meeting]:
        """In the order of the text; a call of a function that makes them counts as they do."""
        return [meeting for call in self._script.calls for meeting in self.at(call)]

    def at(self, call: ast.Call) -> list[Meeting]:
        """What a call is, or what the function that it calls does in any case."""
        own = self._meeting(call)
        if own is not None:
            return [own]
        called = self._script.names.definition(call)
        if called is None or called in self._script.names.above(call):
            return []
        inside = self._of_function(called)
        return [Meeting(call, each.name, each.kind, each.saves, called.name) for each in inside]

    def among(self, nodes: tuple[ast.AST, ...]) -> set[str]:
        """The kinds of all that is met below some nodes."""
        calls = [inner for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Call)]
        return {meeting.kind for call in calls for meeting in self.at(call)}

    def unmatched(self, meeting: Meeting) -> Branch | None:
        """The branch for some ranks that keeps the others from a meeting; None where they come too."""
        for branch in self._script.ranks.branches(meeting.call):
            met = self.among(branch.other) | self._behind(branch)
            if meeting.kind not in met and not self._met_elsewhere(meeting, branch):
                return branch
        return None

    def _behind(self, branch: Branch) -> set[str]:
        """What the other ranks do behind a branch that ends with a `return`: it is their `else`."""
        if not branch.own or not isinstance(branch.own[-1], ast.Return):
            return set()
        names = self._script.names
        return {
            later.kind
            for later in self.all
            if start(later.call) > end(branch.node)
            and names.function_of(later.call) is names.function_of(branch.node)
        }

    def _met_elsewhere(self, meeting: Meeting, branch: Branch) -> bool:
        """Whether another branch of the same function, for the other ranks, has a counterpart."""
        names = self._script.names
        function = names.function_of(meeting.call)
        for other in self.all:
            if other.kind != meeting.kind or names.function_of(other.call) is not function:
                continue
            for theirs in self._script.ranks.branches(other.call):
                if theirs.node is not branch.node and theirs.arm is branch.arm.opposite:
                    return True
        return False

    def after(self, leaving: ast.stmt, branch: Branch) -> Meeting | None:
        """The first meeting that ranks miss which leave by a statement in a branch."""
        names = self._script.names
        around = self._left(leaving)
        own = self.among(branch.own)
        for meeting in self.all:
            is_later = start(meeting.call) > end(branch.node)
            if isinstance(leaving, ast.Break):
                is_later = start(meeting.call) > start(around) and branch.node not in names.above(
                    meeting.call
                )
            inside = around in names.above(meeting.call)
            same = names.function_of(meeting.call) is names.function_of(leaving)
            if not (is_later and inside and same) or meeting.kind in own:
                continue
            if not any(True for _ in self._script.ranks.branches(meeting.call)):
                return meeting
        return None

    def _left(self, leaving: ast.stmt) -> ast.AST:
        """The loop or function that a statement leaves."""
        names = self._script.names
        if isinstance(leaving, ast.Continue | ast.Break):
            for parent in names.above(leaving):
                if isinstance(parent, ast.For | ast.AsyncFor | ast.While):
                    return parent
        return names.function_of(leaving)

    def _of_function(self, function: Function) -> list[Meeting]:
        """What a function does whenever it is called, whatever its arguments are."""
        if function not in self._inside:
            # A function that calls itself adds nothing the second time.
            self._inside[function] = []
            if not self._script.ranks.is_for_rank_0(function):
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                found = [each for call in calls if self._is_certain(call, function) for each in self.at(call)]
                self._inside[function] = found[:8]
        return self._inside[function]

    def _is_certain(self, call: ast.Call, function: Function) -> bool:
        """Whether a call is made in every run of a function: no condition and no early end before it."""
        names = self._script.names
        for parent in names.above(call):
            if parent is function:
                break
            if isinstance(
                parent, ast.If | ast.IfExp | ast.BoolOp | ast.While | ast.ExceptHandler | ast.Lambda
            ):
                return False
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                return False
        return not any(
            isinstance(node, ast.Return) and start(node) < start(call) for node in ast.walk(function)
        )

    def _meeting(self, call: ast.Call) -> Meeting | None:
        dotted = self._script.dotted(call)
        last = dotted.rpartition(".")[2]
        written = ast.unparse(call.func) if len(dotted) < 80 else last
        if dotted.startswith(_GROUPS):
            # A group of its own is entered by its members only.
            group = argument(call, "group")
            everyone = group is None or (isinstance(group, ast.Constant) and group.value is None)
            return Meeting(call, written, last, False) if last in _COLLECTIVES and everyone else None
        if dotted.startswith("deepspeed.") and last.startswith(_FULL):
            return Meeting(call, written, last, False) if self._script.config.stage != 0 else None
        if dotted.startswith("deepspeed.") and last == "GatheredParameters":
            enabled = argument(call, "enabled") is None and self._script.config.stage in (None, 3)
            return Meeting(call, written, last, False) if enabled else None
        return self._of_object(call, written)

    def _of_object(self, call: ast.Call, written: str) -> Meeting | None:
        if not isinstance(call.func, ast.Attribute):
            is_forward = self._script.config.stage == 3 and self._script.is_engine(call.func)
            return Meeting(call, written, "forward", False) if is_forward else None
        last, value = call.func.attr, call.func.value
        if last in _SAVES | _SAVES_INSIDE | _STEPS and self._script.is_engine(value):
            return Meeting(call, written, last, last not in _STEPS)
        if last in _OF_GUARD and self._made_by(value).endswith(_GUARD):
            return Meeting(call, written, f"guard.{last}", True)
        if last == "wait_for_everyone" and self._made_by(value).endswith("Accelerator"):
            return Meeting(call, written, last, False)
        return None

    def _made_by(self, value: ast.expr) -> str:
        made = self._script.names.origin(value)
        return self._script.dotted(made) if isinstance(made, ast.Call) else ""
