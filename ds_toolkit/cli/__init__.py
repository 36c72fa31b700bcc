"""The command line: each command parses its arguments, calls one room, and prints."""

from __future__ import annotations


def main() -> None:
    """Run `ds-toolkit`; exit codes are 0 (fine), 1 (findings) and 2 (failure)."""
    import os

    # Pydantic would look through the metadata of every installed package for plugins of its own.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    from ds_toolkit.cli.app import run

    run()
