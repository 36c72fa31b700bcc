"""What rules of environment files look at, and the registry that their families fill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_toolkit.env.envfile import NAME, EnvFile, EnvLine
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.rules import Registry


@dataclass(frozen=True)
class EnvTarget:
    """A `.deepspeed_env` and what it is meant for.

    Attributes:
        env_file: its lines.
        launcher: what starts the ranks; None if that is not known.
        infiniband: whether the hosts have InfiniBand or RoCE devices; None if that is not known.
    """

    env_file: EnvFile
    launcher: Launcher | None = None
    infiniband: bool | None = None

    @property
    def lines(self) -> tuple[EnvLine, ...]:
        """The lines as the launcher splits them."""
        return self.env_file.lines

    @property
    def settings(self) -> Iterator[EnvLine]:
        """The lines that set a variable."""
        return (line for line in self.lines if line.key is not None and NAME.fullmatch(line.key))


RULES: Registry[EnvTarget] = Registry()


def at_name(line: EnvLine) -> str:
    """The place of a line, as rules name it."""
    return str(line.number)


def at_value(line: EnvLine) -> str:
    """The place of a line's value, as rules name it."""
    return f"{line.number}/value"
