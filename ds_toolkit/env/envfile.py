"""A `.deepspeed_env`, read as DeepSpeed's launcher reads it, and lines that it carries unharmed."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.files import read_utf8

DEFAULT_NAME = ".deepspeed_env"
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# The characters that the launcher leaves unquoted, and that no shell changes.
SAFE_VALUE = re.compile(r"[\w@%+=:,./-]*", re.ASCII)


@dataclass(frozen=True)
class EnvLine:
    """One line as the launcher splits it.

    Attributes:
        number: counted from 1.
        text: the line without its end.
        key: what stands before the first `=`, stripped; None where there is no `=`, which ends the launcher.
        value: what stands after it, stripped.
    """

    number: int
    text: str
    key: str | None
    value: str


@dataclass(frozen=True)
class EnvFile:
    """The lines of a `.deepspeed_env`; `file` is the name to show to people."""

    lines: tuple[EnvLine, ...]
    file: str | None = None

    @property
    def variables(self) -> dict[str, str]:
        """What the launcher exports: the last line of a name wins.

        Raises:
            ToolkitError: a line without `=`, at which the launcher ends with a ValueError.
        """
        for line in self.lines:
            if line.key is None:
                raise ToolkitError(
                    f"the launcher cannot read `{line.text}`"
                    if line.text
                    else "the launcher cannot read a blank line",
                    where=f"{self.file or DEFAULT_NAME}:{line.number}",
                    why="every line must hold a `=`; comments and blank lines end the launcher",
                    fix="remove the line",
                )
        return {line.key: line.value for line in self.lines if line.key is not None}


def env_file_paths(environ: Mapping[str, str], home: Path, folder: Path) -> list[Path]:
    """The files that the launcher would read, in its order; a variable in a later one wins.

    They are read for launches over several nodes only, or with `--force_multi`.
    """
    name = environ.get("DS_ENV_FILE", DEFAULT_NAME)
    return [path for path in (home / name, folder / name) if path.is_file()]


def read_env_file(path: Path) -> EnvFile:
    """Split a file into lines as the launcher does.

    Raises:
        ToolkitError: it cannot be opened, or is not UTF-8 text.
    """
    return parse_env_text(read_utf8(path, "environment file"), file=str(path))


def parse_env_text(text: str, file: str | None = None) -> EnvFile:
    """Split a text into lines as the launcher does: at the first `=`, with nothing skipped."""
    lines = []
    # As a text file is read: \n, \r\n and \r end a line, and nothing else that str.splitlines knows.
    for number, line in enumerate(io.StringIO(text, newline=None), start=1):
        before, equals, after = line.partition("=")
        lines.append(EnvLine(number, line.rstrip("\n"), before.strip() if equals else None, after.strip()))
    return EnvFile(tuple(lines), file)


def env_line(name: str, value: str) -> str:
    """A line, with its end, that the launcher and a shell carry to the ranks unchanged.

    Raises:
        ToolkitError: the name is none, or the value holds what a shell would change.
    """
    if not NAME.fullmatch(name):
        raise ToolkitError(f"`{name}` is not the name of an environment variable")
    if not SAFE_VALUE.fullmatch(value):
        raise ToolkitError(
            f"the value of `{name}` would not reach the ranks as it is",
            where=value,
            why="the launcher hands it to a remote shell without escaping it",
            fix="use letters, digits and @ % + = : , . / - only, or set the variable in the training script",
        )
    return f"{name}={value}\n"
