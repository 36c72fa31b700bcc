"""From the files of a launch to what preflight asks about, with what the linters say of those files."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_toolkit.config.guard_settings import AUTO, SECTION, GuardSettings, guard_settings
from ds_toolkit.config.reader import read_config
from ds_toolkit.doctor.preflight.fleet import RELEVANT, Intent
from ds_toolkit.env.envfile import EnvFile, env_file_paths, read_env_file
from ds_toolkit.env.hostfile import Hostfile, read_hostfile
from ds_toolkit.env.hostfile_rules import lint_hostfile
from ds_toolkit.env.launchers import Launcher
from ds_toolkit.env.rules import lint_env
from ds_toolkit.findings import Finding

# The launcher reads it where no other is named: DLTS_HOSTFILE in deepspeed/launcher/runner.py.
DEFAULT_HOSTFILE = Path("/job/hostfile")
# What imports of torch depend on.
_FOR_IMPORTS = ("DS_ACCELERATOR", "LD_LIBRARY_PATH", "PYTHONPATH")
# Weights in 16 or 32 bits, and fp32 weights and two moments of Adam.
_STATES_BYTES, _HALF_BYTES, _FULL_BYTES = 12, 2, 4
_TWO_SLOTS, _THREE_SLOTS = 2, 3


@dataclass(frozen=True)
class Files:
    """What was named on the command line; None for what was not."""

    hostfile: Path | None = None
    config: Path | None = None
    env_file: Path | None = None
    checkpoint_dir: Path | None = None
    script: Path | None = None
    python: Path | None = None


def prepare(
    files: Files, launcher: Launcher, master_port: int, num_parameters: int | None = None
) -> tuple[Intent, list[Finding]]:
    """The launch that is meant, and the findings about its hostfile and its environment file.

    Raises:
        ToolkitError: a file cannot be read, or no host can be taken from the hostfile.
    """
    named = files.hostfile or (DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.is_file() else None)
    hostfile = read_hostfile(named) if named is not None else None
    env_files = _env_files(files.env_file)
    findings = lint_hostfile(hostfile) if hostfile else []
    findings += [finding for file in env_files for finding in lint_env(file, launcher)]
    # Of a variable in two files the later one counts, as with the launcher.
    lines = tuple(line for file in env_files for line in file.lines)
    env_file = EnvFile(lines, env_files[-1].file) if env_files else None
    data = read_config(files.config).data if files.config is not None else {}
    settings, is_guarded = _guard_of(data)
    intent = Intent(
        slots=_slots(hostfile),
        launcher=launcher,
        # Not resolved: a link in a virtual environment is what makes it one.
        python=str((files.python or Path(sys.executable)).absolute()),
        folder=str(Path.cwd()),
        script=_absolute(files.script),
        checkpoint_dir=_absolute(files.checkpoint_dir),
        master_port=master_port,
        env_file=env_file,
        environment=_environment(env_file),
        shell_variables={name: value for name, value in os.environ.items() if RELEVANT.match(name)},
        checkpoint_bytes=_checkpoint_bytes(data, num_parameters),
        keep_last=settings.keep_last,
        deadline_seconds=settings.deadline_seconds,
        arena_slots=_arena_slots(data, settings) if is_guarded else 0,
    )
    return intent, findings


def _absolute(path: Path | None) -> str | None:
    return None if path is None else os.path.normpath(path.absolute())


def _slots(hostfile: Hostfile | None) -> Mapping[str, int | None]:
    return dict(hostfile.slots) if hostfile is not None else {}


def _env_files(named: Path | None) -> list[EnvFile]:
    """The file that was named, or all that the launcher would read, in its order."""
    paths = [named] if named is not None else env_file_paths(os.environ, Path.home(), Path.cwd())
    # The home folder may be the one where the launch begins.
    different = {path.resolve(): path for path in paths}
    return [read_env_file(path) for path in different.values()]


def _environment(env_file: EnvFile | None) -> dict[str, str]:
    """What the probe's imports need to see what the ranks will see."""
    environment = {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}
    # As the launcher does it for several hosts.
    environment["PYTHONPATH"] = ":".join(filter(None, [str(Path.cwd()), environment.get("PYTHONPATH")]))
    for line in env_file.lines if env_file else ():
        if line.key in _FOR_IMPORTS:
            environment[line.key] = line.value
    return environment


def _guard_of(data: Mapping[str, object]) -> tuple[GuardSettings, bool]:
    section = data.get(SECTION)
    is_guarded = isinstance(section, Mapping)
    return guard_settings(section if isinstance(section, Mapping) else None, None), is_guarded


def _checkpoint_bytes(data: Mapping[str, object], num_parameters: int | None) -> int | None:
    if num_parameters is None:
        return None
    is_half = any(_is_on(data.get(key)) for key in ("bf16", "fp16"))
    return num_parameters * (_STATES_BYTES + (_HALF_BYTES if is_half else _FULL_BYTES))


def _is_on(section: object) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") in (True, AUTO)


def _arena_slots(data: Mapping[str, object], settings: GuardSettings) -> int:
    """Snapshots that a host keeps in memory: at stage 0 ranks may be two steps apart."""
    if not settings.takes_snapshots or settings.arena not in (AUTO, "memory"):
        return 0
    zero = data.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return _TWO_SLOTS if stage in (1, 2, 3) else _THREE_SLOTS
