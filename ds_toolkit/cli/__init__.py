"""The command line: each command parses its arguments, calls one room, and prints."""

from __future__ import annotations


def main() -> None:
    """Run `ds-toolkit`; exit codes are 0 (fine), 1 (findings) and 2 (failure)."""
    from ds_toolkit.cli.app import run

    run()
