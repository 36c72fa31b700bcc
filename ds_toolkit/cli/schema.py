"""`ds-toolkit schema`: JSON Schema of the whole ds_config, for editors."""

from __future__ import annotations

import json
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
    from ds_toolkit.config.schema.export import json_schema
    from ds_toolkit.errors import ToolkitError
    from ds_toolkit.files import write_whole

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        write_whole(output, text.encode())
    except OSError as error:
        raise ToolkitError("the file cannot be written", where=output, why=error.strerror) from error
