"""The settings of `CheckpointGuard`, as they stand in a ds_config under `ds_toolkit` and in Python."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import parse_seconds

SECTION = "ds_toolkit"


class GuardSettings(BaseModel):
    """When to save, how many checkpoints to keep, and how much to prove before one is loaded."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    save_every: int | str = Field(
        default="10min", description="Interval of periodic checkpoints: optimizer steps (50) or time (10min)."
    )
    keep_last: int = Field(
        default=3, ge=1, description="How many committed checkpoints to keep; protected ones are not counted."
    )
    on_save_failure: Literal["raise", "continue"] = Field(
        default="raise", description="What a failed save does to the training: end it, or warn and go on."
    )
    verify_on_resume: Literal["crc32", "sizes"] = Field(
        default="crc32", description="What is compared with the manifest before a checkpoint is loaded."
    )

    @field_validator("save_every", mode="before")
    @classmethod
    def _steps_or_duration(cls, value: object) -> object:
        if isinstance(value, str):
            if value == "auto":
                raise ValueError("`auto` is not available yet; give steps (50) or a duration (10min)")
            if not 0 < _seconds(value) < float("inf"):
                raise ValueError(f"`{value}` is not a positive duration")
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"`{value!r}` is neither steps (50) nor a duration (10min)")
        elif value < 1:
            raise ValueError(f"{value} steps is not an interval; give 1 or more")
        return value

    @property
    def save_every_steps(self) -> int | None:
        """The interval in optimizer steps; None where it is a duration."""
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_every_seconds(self) -> float | None:
        """The interval in seconds; None where it is counted in steps."""
        return parse_seconds(self.save_every) if isinstance(self.save_every, str) else None


def guard_settings(
    section: Mapping[str, object] | None,
    settings: GuardSettings | Mapping[str, object] | None,
    **arguments: object,
) -> GuardSettings:
    """The settings that hold: arguments beat `settings`, those the ds_config's section, that the defaults.

    Args:
        section: what the ds_config has under `ds_toolkit`.
        settings: from Python; of a `GuardSettings` only the fields that were set count.
        **arguments: single settings by name; None means not given.

    Raises:
        ToolkitError: a key that does not exist (with the nearest real one) or a value that is not allowed.
    """
    if isinstance(settings, GuardSettings):
        settings = {name: getattr(settings, name) for name in settings.model_fields_set}
    given = {name: value for name, value in arguments.items() if value is not None}
    merged: dict[str, object] = {}
    for source, values in (
        (f"section `{SECTION}` of the ds_config", section),
        ("settings of CheckpointGuard", settings),
        ("arguments of CheckpointGuard", given),
    ):
        merged.update(_checked(values, source))
    return GuardSettings.model_validate(merged)


def settings_problems(values: object) -> list[tuple[str, str, str | None]]:
    """What is wrong with a set of settings: key (empty for the set as a whole), message and fix of each."""
    if not isinstance(values, Mapping):
        return [("", "the guard's settings must be an object of names and values", None)]
    try:
        GuardSettings.model_validate(dict(values))
    except ValidationError as error:
        return [
            _problem(str(details["loc"][0]), details["type"], details["msg"]) for details in error.errors()
        ]
    return []


def _checked(values: object, source: str) -> Mapping[str, object]:
    if values is None:
        return {}
    for key, message, fix in settings_problems(values):
        raise ToolkitError(message, where=f"{source}, `{key}`" if key else source, fix=fix)
    assert isinstance(values, Mapping)  # noqa: S101  (settings_problems has looked)
    return values


def _problem(key: str, kind: str, message: str) -> tuple[str, str, str | None]:
    if kind != "extra_forbidden":
        return key, f"`{key}`: {message.removeprefix('Value error, ')}", None
    known = list(GuardSettings.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    fix = f"did you mean `{near[0]}`?" if near else f"the settings are {', '.join(known)}"
    return key, f"there is no setting `{key}`", fix


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ToolkitError as error:
        # Pydantic collects ValueErrors only.
        raise ValueError(f"{error.what}; {error.fix}") from error
