"""Which keys a ds_config has, with type, default and a line on each; tests/contract compares with DeepSpeed.

The models are those of the versions in `SUPPORTED_DEEPSPEED`; on a newer one, unknown keys are warnings.
"""

from __future__ import annotations

from ds_toolkit.config.schema.removed import RELOCATED_KEYS, REMOVED_TOP_LEVEL_KEYS, REMOVED_ZERO_KEYS
from ds_toolkit.config.schema.section import RawSection, Section, fields_by_key, keys_of
from ds_toolkit.config.schema.top_level import DsConfig
from ds_toolkit.config.schema.zero import ZeroOptimization

# The oldest and the newest version that the contract tests have passed with.
SUPPORTED_DEEPSPEED = ("0.19.8", "0.19.8")
TOP_LEVEL_KEYS = frozenset(keys_of(DsConfig))
ZERO_KEYS = frozenset(keys_of(ZeroOptimization))

__all__ = [
    "RELOCATED_KEYS",
    "REMOVED_TOP_LEVEL_KEYS",
    "REMOVED_ZERO_KEYS",
    "SUPPORTED_DEEPSPEED",
    "TOP_LEVEL_KEYS",
    "ZERO_KEYS",
    "DsConfig",
    "RawSection",
    "Section",
    "ZeroOptimization",
    "fields_by_key",
    "keys_of",
]
