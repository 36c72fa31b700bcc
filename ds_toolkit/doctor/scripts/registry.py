"""The registry that the families of rules about scripts fill."""

from __future__ import annotations

import ast

from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.rules import Problem, Registry

RULES: Registry[Script] = Registry()
rule = RULES.rule


def at(node: ast.expr | ast.stmt, message: str, fix: str) -> Problem:
    """A problem at a node of the tree; its pointer is the line and the offset, as `ast` counts them."""
    return Problem(f"{node.lineno}:{node.col_offset}", message, fix)
