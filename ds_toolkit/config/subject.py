"""What config rules look at: the data, the place that it is meant for, and pointers into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

# DeepSpeed reads these values through pydantic, which takes "2" and 2.0 for 2.
_BOOLEAN: TypeAdapter[bool] = TypeAdapter(bool)
_INTEGER: TypeAdapter[int] = TypeAdapter(int)


def json_pointer(*parts: str | int) -> str:
    """The JSON pointer (RFC 6901) that leads through these keys and indices; empty for the whole document."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


@dataclass(frozen=True)
class Config:
    """A ds_config under examination.

    Attributes:
        data: the configuration as DeepSpeed would get it.
        world_size: number of data-parallel ranks, None when it is not known.
    """

    data: Mapping[str, object]
    world_size: int | None = None

    def section(self, *path: str) -> Mapping[str, object]:
        """The object at this path; empty where there is none or something else stands there."""
        value: object = self.data
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value if isinstance(value, Mapping) else {}

    def integer(self, key: str) -> int | None:
        """A whole number at the top level; None where there is none or something else stands there."""
        value = self.data.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def is_enabled(self, section: str) -> bool:
        """Whether DeepSpeed would take the section's `enabled` for true, spelt as `true`, `"true"` or 1."""
        try:
            return _BOOLEAN.validate_python(self.section(section).get("enabled", False))
        except ValidationError:
            return False

    @property
    def zero_stage(self) -> int | None:
        """The ZeRO stage that DeepSpeed would use; None where it would refuse what is written."""
        if "zero_optimization" not in self.data:
            return 0
        # A bare boolean is the oldest spelling: it switches stage 1 on.
        value = self.data["zero_optimization"]
        if isinstance(value, bool):
            return int(value)
        try:
            stage = _INTEGER.validate_python(self.section("zero_optimization").get("stage", 0))
        except ValidationError:
            return None
        return stage if 0 <= stage <= 3 else None
