"""The `.deepspeed_env` that DeepSpeed's launcher reads for launches over several nodes only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.env.envfile import NAME, EnvFile, env_file_paths, read_env_file
from ds_toolkit.env.variables import SET_BY_THE_LAUNCHER
from ds_toolkit.errors import ToolkitError

# Holds the id of a process that has begun again with the file's variables: it does so once.
_BEGUN_AGAIN = "DS_TOOLKIT_BEGUN_AGAIN"


@dataclass(frozen=True)
class Ignored:
    """What stands in environment files and has not reached this process.

    Attributes:
        variables: those whose values differ from this process's; a value of the file beats an exported one,
            as on launches over several nodes.
        left_out: names in the files that the launcher sets for each rank itself.
        files: where they stand, the one that wins last.
    """

    variables: Mapping[str, str]
    left_out: tuple[str, ...]
    files: tuple[Path, ...]

    def __str__(self) -> str:
        """Names and never values, which may be secrets."""
        files = ", ".join(map(str, self.files))
        left_out = f"; left to the launcher: {', '.join(self.left_out)}" if self.left_out else ""
        names = ", ".join(sorted(self.variables))
        return f"{files}, which this launch does not read, applied all the same: {names}{left_out}"


def ignored_variables(environ: Mapping[str, str], home: Path, folder: Path) -> Ignored | None:
    """What the launcher of this process has ignored; None if it reads the files, or there is nothing new.

    Raises:
        ToolkitError: a file cannot be read, or has a line at which DeepSpeed's launcher would end.
    """
    if not _is_ignorant(environ):
        return None
    files = tuple(dict.fromkeys(env_file_paths(environ, home, folder)))
    merged: dict[str, str] = {}
    for path in files:
        merged |= _variables_of(read_env_file(path))
    variables = {
        name: value
        for name, value in merged.items()
        if name not in SET_BY_THE_LAUNCHER and environ.get(name) != value
    }
    if not variables:
        return None
    return Ignored(variables, tuple(sorted(merged.keys() & SET_BY_THE_LAUNCHER)), files)


def apply_ignored_variables() -> None:
    """Let this process begin again with the variables that its launcher has ignored, if there are any.

    By exec, since the interpreter and the dynamic linker read some (PYTHONPATH, LD_LIBRARY_PATH) only then.
    The process id stays, so the launcher notices nothing.

    Raises:
        ToolkitError: as `ignored_variables`.
    """
    if os.environ.pop(_BEGUN_AGAIN, None) == str(os.getpid()):
        return
    ignored = ignored_variables(os.environ, Path("~").expanduser(), Path.cwd())
    if ignored is None:
        return
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"[ds_toolkit] {ignored}", file=sys.stderr, flush=True)
    environment = {**os.environ, **ignored.variables, _BEGUN_AGAIN: str(os.getpid())}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606


def _is_ignorant(environ: Mapping[str, str]) -> bool:
    """Whether nobody has read the files: DeepSpeed's launcher on one node, or torchrun."""
    num_nodes = environ.get("CROSS_SIZE")
    return "TORCHELASTIC_RUN_ID" in environ if num_nodes is None else num_nodes == "1"


def _variables_of(file: EnvFile) -> dict[str, str]:
    variables = file.variables
    for name, value in variables.items():
        if not NAME.fullmatch(name) or "\0" in value:
            raise ToolkitError(
                f"`{name}` cannot be set as an environment variable",
                where=file.file,
                fix="write NAME=value, or remove the line; `ds-toolkit lint` finds all such lines",
            )
    return variables
