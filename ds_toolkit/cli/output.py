"""How commands speak: results on standard output, everything else on standard error."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.text import Text

from ds_toolkit.errors import ToolkitError

JSON_SCHEMA_VERSION = 1


def console() -> Console:
    """Standard output; colour only on a terminal."""
    return Console(highlight=False, soft_wrap=True)


def error_console() -> Console:
    """Standard error; colour only on a terminal."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def print_json(data: dict[str, object]) -> None:
    """One JSON document on standard output, marked with the version of its shape."""
    json.dump({"schema": JSON_SCHEMA_VERSION, **data}, sys.stdout, indent=2, allow_nan=False)
    sys.stdout.write("\n")


def print_error(error: ToolkitError, *, as_json: bool) -> None:
    """An error for a person on standard error, or for a machine on standard output."""
    if as_json:
        print_json({"error": error.as_dict()})
        return
    text = Text("error: ", style="bold red")
    text.append(str(error), style="default")
    error_console().print(text)
