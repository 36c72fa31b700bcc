"""A configuration in, everything that is wrong with it out."""

from __future__ import annotations

from collections.abc import Mapping

from ds_toolkit.config.reader import Document
from ds_toolkit.config.rules import RULES
from ds_toolkit.config.subject import Config
from ds_toolkit.findings import Finding, Where


def lint(
    config: Document | Mapping[str, object], *, world_size: int | None = None, file: str | None = None
) -> list[Finding]:
    """What the rules find in a ds_config, in the order of the text.

    Args:
        config: data, or a document that was read, whose findings then carry lines and columns.
        world_size: number of data-parallel ranks it is meant for; None leaves out what depends on it.
        file: the name to show for plain data; a document knows its own.
    """
    if isinstance(config, Document):
        findings = RULES.findings(Config(config.data, world_size), config.where)
        return sorted(findings, key=lambda finding: (finding.where.line or 0, finding.where.column or 0))
    return RULES.findings(Config(config, world_size), lambda pointer: Where(file, pointer))
