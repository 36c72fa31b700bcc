"""Who is who in a syntax tree: scopes, aliases of imports, what was assigned to a name, who calls whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Position = tuple[int, int]
_DEPTH = 12


@dataclass(frozen=True)
class Binding:
    """One way in which a name gets its meaning.

    Attributes:
        node: the statement, parameter or definition that does it.
        since: the position from which on it holds.
        value: what is assigned, where that is an expression.
        index: which element of the value, where a tuple is unpacked; None for the whole.
        dotted: what is imported.
    """

    node: ast.AST
    since: Position
    value: ast.expr | None = None
    index: int | None = None
    dotted: str | None = None


@dataclass
class Scope:
    """A module, class or function and the names that are bound in it."""

    node: ast.AST
    parent: Scope | None
    names: dict[str, list[Binding]] = field(default_factory=dict)


class Names:
    """The names of one tree.

    Attributes:
        parents: the node above each node.
        nodes: all nodes in the order of the text.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        self._scopes: dict[ast.AST, Scope] = {}
        self._fields: dict[tuple[ast.AST, str], list[Binding]] = {}
        self._calls: dict[ast.AST, list[ast.Call]] = {}
        self._walk(tree)
        for node in self.nodes:
            if isinstance(node, ast.Call) and (called := self.definition(node)) is not None:
                self._calls.setdefault(called, []).append(node)

    def _walk(self, tree: ast.Module) -> None:
        # A stack of its own: a tree may be deeper than Python's.
        stack: list[tuple[ast.AST, Scope]] = [(tree, Scope(tree, None))]
        while stack:
            node, scope = stack.pop()
            self.nodes.append(node)
            self._bind(node, scope)
            inside = scope
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                inside = Scope(node, scope)
            self._scopes[node] = inside
            children = [
                child
                for child in ast.iter_child_nodes(node)
                if not isinstance(
                    child, ast.expr_context | ast.operator | ast.boolop | ast.cmpop | ast.unaryop
                )
            ]
            for child in reversed(children):
                self.parents[child] = node
                stack.append((child, inside))

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                dotted = alias.name if alias.asname else alias.name.partition(".")[0]
                self._add(scope, alias.asname or dotted, Binding(node, end(node), dotted=dotted))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                dotted = f"{node.module or ''}.{alias.name}".lstrip(".")
                self._add(scope, alias.asname or alias.name, Binding(node, end(node), dotted=dotted))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self._add(scope, node.name, Binding(node, start(node)))
        elif isinstance(node, ast.arg):
            self._add(scope, node.arg, Binding(node, start(node)))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, node, scope)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            self._assign(node.target, node.value, node, scope)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, None, node, scope)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, node.context_expr, node.context_expr, scope)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            self._assign(node.target, None, node.target, scope)

    def _assign(self, target: ast.expr, value: ast.expr | None, node: ast.AST, scope: Scope) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                inner = part.value if isinstance(part, ast.Starred) else part
                whole = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                if whole and isinstance(value, ast.Tuple) and not isinstance(part, ast.Starred):
                    self._assign(part, value.elts[index], node, scope)
                else:
                    known = None if isinstance(part, ast.Starred) else value
                    self._add_target(inner, Binding(node, end(node), known, index), scope)
        else:
            self._add_target(target, Binding(node, end(node), value), scope)

    def _add_target(self, target: ast.expr, binding: Binding, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            self._add(scope, target.id, binding)
        elif isinstance(target, ast.Attribute) and (owner := self._owner(target, scope)) is not None:
            self._fields.setdefault((owner, target.attr), []).append(binding)

    def _add(self, scope: Scope, name: str, binding: Binding) -> None:
        scope.names.setdefault(name, []).append(binding)

    def _owner(self, node: ast.Attribute, scope: Scope | None) -> ast.AST | None:
        """The class whose `self` the attribute is asked of."""
        if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            return None
        while scope is not None and not isinstance(scope.node, ast.ClassDef):
            scope = scope.parent
        return scope.node if scope is not None else None

    def bindings(self, node: ast.expr) -> list[Binding]:
        """What a name or an attribute of `self` may mean where it stands; the last certain one and later."""
        if isinstance(node, ast.Attribute):
            owner = self._owner(node, self._scopes.get(node))
            return self._fields.get((owner, node.attr), []) if owner is not None else []
        if not isinstance(node, ast.Name):
            return []
        home: Scope | None = self._scopes.get(node)
        first = home
        while home is not None:
            found = home.names.get(node.id)
            if found and (home is first or not isinstance(home.node, ast.ClassDef)):
                return self._before(found, node) if home is first else found
            home = home.parent
        return []

    def _before(self, found: list[Binding], node: ast.expr) -> list[Binding]:
        kept: list[Binding] = []
        for binding in found:
            if binding.since <= start(node):
                kept = [binding] if self._always_before(binding, node) else [*kept, binding]
        return kept or found

    def _always_before(self, binding: Binding, node: ast.expr) -> bool:
        """Whether the node is reached only past the binding: its block is one of the node's."""
        block = self._block(binding.node)
        return block is None or block in self.above(node)

    def _block(self, node: ast.AST) -> ast.AST | None:
        for parent in self.above(node):
            if isinstance(parent, ast.If | ast.For | ast.AsyncFor | ast.While | ast.Try):
                return parent
            if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                return None
        return None

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function that a node stands in, or the module."""
        last = node
        for last in self.above(node):
            if isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                break
        return last

    def definition(self, call: ast.Call) -> Function | None:
        """The function of this tree that a call calls, or the method of `self`."""
        if isinstance(call.func, ast.Attribute):
            owner = self._owner(call.func, self._scopes.get(call.func))
            body = owner.body if isinstance(owner, ast.ClassDef) else []
            methods = [part for part in body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            return next((part for part in methods if part.name == call.func.attr), None)
        found = self.bindings(call.func)
        last = found[-1].node if found else None
        return last if isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef) else None

    def calls_of(self, function: ast.AST) -> list[ast.Call]:
        """The calls of a function of this tree."""
        return self._calls.get(function, [])

    def dotted(self, node: ast.expr) -> str:
        """The full name of a name or attribute, imports and aliases resolved: `torch.utils.data.DataLoader`.

        Empty for what is no name; a name that is bound to a value here is itself.
        """
        for _ in range(_DEPTH):
            parts: list[str] = []
            inner = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if not isinstance(inner, ast.Name):
                return ""
            tail = "".join(f".{part}" for part in reversed(parts))
            found = self.bindings(inner)
            imported = next((binding.dotted for binding in found if binding.dotted), None)
            if imported is not None:
                return imported + tail
            value = found[0].value if len(found) == 1 and found[0].index is None else None
            if parts or not isinstance(value, ast.Attribute | ast.Name) or self._is_own(value):
                return inner.id + tail
            node = value
        return ""

    def _is_own(self, value: ast.expr) -> bool:
        while isinstance(value, ast.Attribute):
            value = value.value
        return not any(binding.dotted for binding in self.bindings(value))

    def origins(self, node: ast.expr, depth: int = _DEPTH) -> list[tuple[ast.expr, int | None]]:
        """The expressions that a name may stand for, each with the element of it that is meant.

        Follows assignments, attributes of `self`, and parameters to the arguments of their calls.
        """
        found = self.bindings(node) if depth else []
        if not found or any(binding.dotted for binding in found):
            return [(node, None)]
        reached: list[tuple[ast.expr, int | None]] = []
        for binding in found:
            values = [binding.value] if binding.value is not None else self._arguments(binding.node)
            for value in values:
                if binding.index is None:
                    reached += self.origins(value, depth - 1)
                else:
                    reached.append((value, binding.index))
            if not values:
                reached.append((node, None))
        return reached

    def origin(self, node: ast.expr) -> ast.expr:
        """The one expression that a name stands for; the name itself where that is not certain."""
        reached = self.origins(node)
        return reached[0][0] if len(reached) == 1 and reached[0][1] is None else node

    def _arguments(self, parameter: ast.AST) -> list[ast.expr]:
        """What the calls in this tree give for a parameter."""
        arguments = self.parents.get(parameter)
        function = self.parents.get(arguments) if isinstance(arguments, ast.arguments) else None
        if not isinstance(arguments, ast.arguments) or function is None or not isinstance(parameter, ast.arg):
            return []
        listed = [*arguments.posonlyargs, *arguments.args]
        is_method = bool(listed) and listed[0].arg == "self"
        place = listed.index(parameter) - is_method if parameter in listed else None
        return [
            value
            for call in self.calls_of(function)
            if (value := argument(call, parameter.arg, place)) is not None
        ]


def argument(call: ast.Call, name: str | None, place: int | None = None) -> ast.expr | None:
    """The argument of a call by its name, or else by its place."""
    for keyword in call.keywords:
        if name is not None and keyword.arg == name:
            return keyword.value
    if place is None or not 0 <= place < len(call.args):
        return None
    return None if any(isinstance(part, ast.Starred) for part in call.args[: place + 1]) else call.args[place]


def takes_unknown_keywords(call: ast.Call) -> bool:
    """Whether `**` or `*` hands it arguments that cannot be seen."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(part, ast.Starred) for part in call.args
    )


def start(node: ast.AST) -> Position:
    """Where a node begins, as `ast` counts."""
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def end(node: ast.AST) -> Position:
    """Where a node ends."""
    return (getattr(node, "end_lineno", 0) or 0, getattr(node, "end_col_offset", 0) or 0)
