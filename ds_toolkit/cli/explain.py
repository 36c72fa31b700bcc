"""`ds-toolkit explain`: a rule's manual page."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    code: Annotated[str, typer.Argument(metavar="CODE", help="Code or name of a rule, such as DS001.")],
) -> None:
    """Print what a rule looks for, why, and examples of what it refuses and accepts."""
    from rich.text import Text

    from ds_toolkit.cli.catalogue import rule_named
    from ds_toolkit.cli.output import console

    rule = rule_named(code)
    text = Text(f"{rule.code} {rule.name}", style="bold")
    text.append(f" ({rule.severity.value})\n\n", style="default")
    text.append(rule.manual, style="default")
    console().print(text)
