"""Which expressions differ from rank to rank, and which statements only some ranks reach."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from ds_toolkit.doctor.scripts.names import Function, Names

_NAME = re.compile(
    r"(local_|global_|world_|node_|my_|dp_|proc_|process_)?rank(_id)?|RANK|LOCAL_RANK"
    r"|(is_|am_)?(local_|world_|global_)?(main|master|chief|first)(_process|_rank|_node)?(_zero)?"
    r"|is_(rank_?(0|zero)|(rank_?)?(0|zero)_rank)|is_rank_zero|process_index|local_process_index"
)
# Words that `_NAME` would take too, and that are about something else.
_NOT_A_RANK = {"main", "first", "master", "chief", "first_node", "master_node", "main_node"}
_CALLS = re.compile(
    r"get_(local_|global_|world_|data_parallel_|node_)?rank|is_(main|master|first)(_process|_rank)?"
    r"|is_(rank_?0|rank_zero|local_main_process|world_process_zero|local_process_zero)"
)
_VARIABLES = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
_ONLY_RANK_0 = {
    "rank_zero_only",
    "on_main_process",
    "main_process_only",
    "master_only",
    "rank0_only",
    "on_rank_0",
}
_LEAVES = (ast.Return, ast.Continue, ast.Break)
_EXITS = {"exit", "quit", "sys.exit", "os._exit"}


class Arm(Enum):
    """Which ranks go into a branch, as far as the text says it."""

    FIRST = "rank 0"
    OTHERS = "the other ranks"
    SOME = "some ranks"

    @property
    def opposite(self) -> Arm:
        """The ranks that do not."""
        return {Arm.FIRST: Arm.OTHERS, Arm.OTHERS: Arm.FIRST, Arm.SOME: Arm.SOME}[self]


@dataclass(frozen=True)
class Branch:
    """The statements or the expression that only some ranks reach.

    Attributes:
        node: the `if`, or the function that a decorator keeps for rank 0.
        arm: which ranks.
        own: what they do.
        other: what the rest does in the other arm.
    """

    node: ast.AST
    arm: Arm
    own: tuple[ast.AST, ...]
    other: tuple[ast.AST, ...]


class Ranks:
    """Answers about the ranks of one tree."""

    def __init__(self, names: Names) -> None:
        self._names = names
        # `--rank 8` of an adapter.
        self._other_ranks = {name for node in names.nodes if (name := _option_above_0(node)) is not None}

    def is_rank(self, node: ast.expr, depth: int = 6) -> bool:
        """Whether an expression is a rank, or says whether this is one rank."""
        if isinstance(node, ast.Name | ast.Attribute):
            found = self._names.bindings(node)
            values = [
                binding.value for binding in found if binding.value is not None and binding.index is None
            ]
            computed = [value for value in values if not isinstance(value, ast.Constant)]
            if values and depth:
                # `rank = 8` is another kind of rank; `rank = 0` alone is one process.
                return any(
                    self.is_rank(value, depth - 1) or self.depends(value, depth - 1) for value in computed
                )
            name = node.id if isinstance(node, ast.Name) else node.attr
            return bool(_NAME.fullmatch(name)) and name not in _NOT_A_RANK | self._other_ranks
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else self._names.dotted(node.func)
            if called == "int" and node.args:
                return self.is_rank(node.args[0], depth)
            if called in {"getenv", "os.getenv", "get"} and node.args:
                return isinstance(node.args[0], ast.Constant) and node.args[0].value in _VARIABLES
            return bool(_CALLS.fullmatch(called.rpartition(".")[2]))
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Constant) and node.slice.value in _VARIABLES
        return False

    def depends(self, node: ast.expr, depth: int = 6) -> bool:
        """Whether a condition may be true on one rank and false on another."""
        return self.arm(node, depth) is not None

    def arm(self, test: ast.expr, depth: int = 6) -> Arm | None:
        """Which ranks a condition lets in; None where it is the same for all of them."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            # `not rank` is rank 0; `not is_main_process()` is the others.
            inner = self.arm(test.operand, depth)
            return inner.opposite if inner is not None else None
        if isinstance(test, ast.BoolOp):
            arms = [arm for value in test.values if (arm := self.arm(value, depth)) is not None]
            return arms[0] if arms else None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._arm_of_comparison(test)
        if isinstance(test, ast.Name | ast.Attribute) and depth:
            found = self._names.bindings(test)
            if len(found) == 1 and found[0].value is not None and found[0].index is None:
                value = found[0].value
                if not isinstance(value, ast.Call | ast.Subscript | ast.Constant):
                    return self.arm(value, depth - 1)
        if not self.is_rank(test, depth):
            return None
        name = self._name(test)
        return Arm.OTHERS if name.lower().endswith("rank") or name in _VARIABLES else Arm.FIRST

    def _name(self, node: ast.expr) -> str:
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else self._names.dotted(node.func)
            return self._name(node.args[0]) if called == "int" and node.args else called.rpartition(".")[2]
        if isinstance(node, ast.Attribute):
            return node.attr
        return node.id if isinstance(node, ast.Name) else "rank"

    def _arm_of_comparison(self, test: ast.Compare) -> Arm | None:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if self.is_rank(right) and not self.is_rank(left):
            left, right = right, left
            if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                return Arm.SOME
        if not self.is_rank(left) or isinstance(operator, ast.Is | ast.IsNot):
            return None
        numbers = _numbers(right)
        if numbers is None:
            return Arm.SOME
        among, above = isinstance(operator, ast.Eq | ast.In), isinstance(operator, ast.NotEq | ast.NotIn)
        if set(numbers) <= {-1, 0} and 0 in numbers and (among or above):
            # `local_rank in (-1, 0)`: -1 means that there is one process only.
            return Arm.FIRST if among else Arm.OTHERS
        if numbers == [-1] or (numbers == [0] and isinstance(operator, ast.GtE | ast.Lt)):
            # `local_rank != -1` and `rank >= 0` ask whether there are ranks at all.
            return None
        if (numbers == [0] and isinstance(operator, ast.Gt)) or (
            numbers == [1] and isinstance(operator, ast.GtE)
        ):
            return Arm.OTHERS
        if (numbers == [0] and isinstance(operator, ast.LtE)) or (
            numbers == [1] and isinstance(operator, ast.Lt)
        ):
            return Arm.FIRST
        return Arm.SOME

    def branches(self, node: ast.AST) -> Iterator[Branch]:
        """The branches for some ranks that a node stands in, inside its function, from the inside out."""
        below = node
        for parent in self._names.above(node):
            if isinstance(parent, ast.If | ast.IfExp) and below is not parent.test:
                arm = self.arm(parent.test)
                if arm is not None:
                    body, orelse = _arms(parent)
                    inside = below in body
                    own, other = (body, orelse) if inside else (orelse, body)
                    yield Branch(parent, arm if inside else arm.opposite, own, other)
            elif isinstance(parent, ast.BoolOp) and below is not parent.values[0]:
                before = parent.values[: parent.values.index(below)] if below in parent.values else []
                arms = [arm for value in before if (arm := self.arm(value)) is not None]
                if arms:
                    met = arms[0] if isinstance(parent.op, ast.And) else arms[0].opposite
                    yield Branch(parent, met, (below,), ())
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef):
                if self.is_for_rank_0(parent):
                    yield Branch(parent, Arm.FIRST, tuple(parent.body), ())
                return
            if isinstance(parent, ast.Lambda):
                return
            below = parent

    def is_for_rank_0(self, function: Function) -> bool:
        """Whether a decorator such as `rank_zero_only` keeps a function for rank 0."""
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if self._names.dotted(called).rpartition(".")[2] in _ONLY_RANK_0:
                return True
        return False

    def exits(self) -> Iterator[tuple[ast.stmt, Branch]]:
        """Statements with which some ranks leave a loop, a function or the program, and where they stand."""
        for node in self._names.nodes:
            leaves = isinstance(node, _LEAVES) or (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Call)
                and self._names.dotted(node.value.func) in _EXITS
            )
            if leaves and isinstance(node, ast.stmt):
                for branch in self.branches(node):
                    if isinstance(branch.node, ast.If):
                        yield node, branch
                    break


def _option_above_0(node: ast.AST) -> str | None:
    """The name of an option of argparse whose default is a number above 0."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
        return None
    first = node.args[0]
    default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    named = (
        node.func.attr == "add_argument" and isinstance(first, ast.Constant) and isinstance(first.value, str)
    )
    above = isinstance(default, ast.Constant) and isinstance(default.value, int) and default.value > 0
    return (
        str(first.value).lstrip("-").replace("-", "_")
        if named and above and isinstance(first, ast.Constant)
        else None
    )


def _numbers(node: ast.expr) -> list[int] | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    values = (
        [value] if isinstance(value, int | str) else value if isinstance(value, list | tuple | set) else None
    )
    try:
        return [int(each) for each in values] if values is not None else None
    except (TypeError, ValueError):
        return None


def _arms(node: ast.If | ast.IfExp) -> tuple[tuple[ast.AST, ...], tuple[ast.AST, ...]]:
    if isinstance(node, ast.If):
        return tuple(node.body), tuple(node.orelse)
    return (node.body,), (node.orelse,)
