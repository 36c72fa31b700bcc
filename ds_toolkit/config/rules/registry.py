"""The registry that the families of config rules fill."""

from __future__ import annotations

from ds_toolkit.config.subject import Config
from ds_toolkit.rules import Registry

RULES: Registry[Config] = Registry()
rule = RULES.rule
