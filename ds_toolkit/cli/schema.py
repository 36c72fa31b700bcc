"""`ds-toolkit schema`: JSON Schema of the whole ds_config, for editors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. [default: standard output]")
    ] = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of a ds_config; editors complete and check with it.

    Put its path into a configuration as "$schema", which DeepSpeed ignores.
    """
    from ds_toolkit.config.schema.export import schema_text
    from ds_toolkit.files import write_output

    text = schema_text()
    if output is None:
        sys.stdout.write(text)
        return
    write_output(output, text.encode())
