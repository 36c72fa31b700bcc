"""A training script in, everything that will hang, be lost or differ between ranks out."""

from __future__ import annotations

from pathlib import Path

from ds_toolkit.doctor.scripts.known_config import KnownConfig
from ds_toolkit.doctor.scripts.rules import RULES
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.doctor.scripts.source import read_source
from ds_toolkit.errors import ToolkitError
from ds_toolkit.findings import Finding


def check_script(
    data: bytes, name: str, *, folder: Path | None = None, config: KnownConfig | None = None
) -> list[Finding]:
    """What the rules find in a script or notebook, in the order of its lines. Nothing of it is executed.

    Args:
        data: the file.
        name: what to call it; a name that ends with `.ipynb` is a notebook.
        folder: where it lies; a ds_config that it names is looked up there. None looks up none.
        config: what is known of its ds_config; None takes what the script says.

    Raises:
        ToolkitError: it cannot be read as Python.
    """
    source = read_source(data, name)
    try:
        script = Script(source, folder, config)
        findings = RULES.findings(script, source.where)
    except RecursionError as error:
        raise ToolkitError(
            "the script is nested too deeply to be checked", where=name, fix="split its longest expression"
        ) from error
    return sorted(findings, key=lambda finding: (finding.where.line or 0, finding.where.column or 0))
