"""The settings of `CheckpointGuard`, as they stand in a ds_config under `ds_toolkit` and in Python."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ds_toolkit.errors import ToolkitError
from ds_toolkit.units import parse_seconds

SECTION = "ds_toolkit"
AUTO = "auto"
_STEPS_OR_TIME = "steps (50), a duration (10min) or `auto`"


class GuardSettings(BaseModel):
    """When to save, what to keep, what snapshots may cost, and what a failure or a hang leads to."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    save_every: int | str = Field(
        default="10min",
        description="Interval of periodic checkpoints: optimizer steps (50), time (10min), or `auto`: what"
        " costs the least by the measured stall, write time and failures.",
    )
    snapshot_every: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        default=1,
        description="Optimizer steps between snapshots in memory, which last words are made of; `auto`: as"
        " few as `overhead_budget` allows; 0: none, and periodic saves are synchronous.",
    )
    overhead_budget: float = Field(
        default=0.03,
        gt=0,
        lt=1,
        description="Share of training time that snapshots may cost with `snapshot_every` `auto`, and"
        " periodic checkpoints with `save_every` `auto`.",
    )
    mttf: str | None = Field(
        default=None,
        description="Mean time between failures of the whole job (8h), for `save_every` `auto`; if not given,"
        " estimated from the incidents of the directory.",
    )
    keep_last: int = Field(
        default=3, ge=1, description="How many committed checkpoints to keep; protected ones are not counted."
    )
    keep_every: int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints of the multiples of so many optimizer steps are kept for ever and not"
        " counted; null: of none.",
    )
    on_save_failure: Literal["raise", "continue"] = Field(
        default="raise", description="What a failed save does to the training: end it, or warn and go on."
    )
    verify_on_resume: Literal["crc32", "sizes"] = Field(
        default="crc32", description="What is compared with the manifest before a checkpoint is loaded."
    )
    on_hang: Literal["report", "last-words"] = Field(
        default="report",
        description="What a hang leads to: a report, or last words and the end of the run. Without snapshots"
        " nobody watches.",
    )
    hang_after: float | int | str = Field(
        default=AUTO,
        description="How long nothing may move before it is a hang: seconds (300), a duration (10min), or"
        " `auto`: ten times the median step, at least 60 s.",
    )
    deadline_seconds: float = Field(
        default=25.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds within which last words must be committed; launchers kill after 30.",
    )
    arena: str = Field(
        default=AUTO,
        description="Where snapshots lie: `memory`, a folder by its absolute path, or `auto`: in memory if"
        " they fit.",
    )

    @field_validator("save_every", mode="before")
    @classmethod
    def _steps_or_duration(cls, value: object) -> object:
        if isinstance(value, str):
            if value != AUTO:
                _check_duration(value)
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"`{value!r}` is neither {_STEPS_OR_TIME}")
        elif value < 1:
            raise ValueError(f"{value} steps is not an interval; give 1 or more")
        return value

    @field_validator("snapshot_every", mode="before")
    @classmethod
    def _steps_or_auto(cls, value: object) -> object:
        # One message instead of one for each member of the union.
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"`{value!r}` is neither a number of steps (1; 0 for none) nor `auto`")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{value} steps is not an interval; give 1 or more, or 0 for no snapshots")
        return value

    @field_validator("mttf")
    @classmethod
    def _duration(cls, value: str | None) -> str | None:
        if value is not None:
            _check_duration(value)
        return value

    @field_validator("hang_after", mode="before")
    @classmethod
    def _seconds_or_auto(cls, value: object) -> object:
        # One message instead of one for each member of the union.
        if isinstance(value, str):
            if value != AUTO:
                _check_duration(value)
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"`{value!r}` is neither seconds (300), a duration (10min) nor `auto`")
        elif not 0 < value < float("inf"):
            raise ValueError(f"`{value}` is not a positive duration")
        return value

    @field_validator("arena")
    @classmethod
    def _place(cls, value: str) -> str:
        if value not in (AUTO, "memory") and not PurePath(value).is_absolute():
            raise ValueError(f"`{value}` is neither `auto`, `memory` nor an absolute path")
        return value

    @property
    def save_every_steps(self) -> int | None:
        """The interval in optimizer steps; None where it is a duration or `auto`."""
        return self.save_every if isinstance(self.save_every, int) else None

    @property
    def save_every_seconds(self) -> float | None:
        """The interval in seconds; None where it is counted in steps or `auto`."""
        return _seconds_of(self.save_every) if isinstance(self.save_every, str) else None

    @property
    def mttf_seconds(self) -> float | None:
        """The mean time between failures of the job; None where it is to be estimated."""
        return None if self.mttf is None else parse_seconds(self.mttf)

    @property
    def hang_after_seconds(self) -> float | None:
        """How long nothing may move; None where the steps seen so far decide."""
        return _seconds_of(self.hang_after) if isinstance(self.hang_after, str) else float(self.hang_after)

    @property
    def takes_snapshots(self) -> bool:
        """Whether there are snapshots at all; without them there are no last words."""
        return self.snapshot_every != 0


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


def _seconds_of(text: str) -> float | None:
    return None if text == AUTO else parse_seconds(text)


def _check_duration(text: str) -> None:
    try:
        seconds = parse_seconds(text)
    except ToolkitError as error:
        # Pydantic collects ValueErrors only.
        raise ValueError(f"{error.what}; {error.fix}") from error
    if not 0 < seconds < float("inf"):
        raise ValueError(f"`{text}` is not a positive duration")
