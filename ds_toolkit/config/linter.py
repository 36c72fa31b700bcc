"""A configuration in, everything that is wrong with it out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ds_toolkit.config.consumers import Consumer
from ds_toolkit.config.reader import Document
from ds_toolkit.config.rules import RULES
from ds_toolkit.config.schema import SUPPORTED_DEEPSPEED
from ds_toolkit.config.subject import Config
from ds_toolkit.findings import Finding, Where

# Rules whose severity depends on whether the schema knows all keys that DeepSpeed knows.
ABOUT_UNKNOWN_KEYS = frozenset({"DS001", "DS004", "DS006"})


def lint(
    config: Document | Mapping[str, object],
    *,
    world_size: int | None = None,
    consumer: Consumer = Consumer.NATIVE,
    newer_deepspeed: bool = False,
    file: str | None = None,
) -> list[Finding]:
    """What the rules find in a ds_config, in the order of the text.

    Args:
        config: data, or a document that was read, whose findings then carry lines and columns.
        world_size: number of ranks it is meant for; None leaves out what depends on it.
        consumer: who hands it to DeepSpeed.
        newer_deepspeed: whether DeepSpeed is newer than the schema; unknown keys are then warnings.
        file: the name to show for plain data; a document knows its own.
    """
    if not isinstance(config, Document):
        subject = Config(config, world_size, consumer, newer_deepspeed)
        return RULES.findings(subject, lambda pointer: Where(file, pointer))
    subject = Config(config.data, world_size, consumer, newer_deepspeed, config)
    findings = RULES.findings(subject, config.where)
    return sorted(findings, key=lambda finding: (finding.where.line or 0, finding.where.column or 0))


def is_newer_than_supported(version: str) -> bool:
    """Whether a DeepSpeed version is newer than the newest that the schema was compared with."""
    return _numbers(version) > _numbers(SUPPORTED_DEEPSPEED[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
