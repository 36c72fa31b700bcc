"""A training script that cannot be edited, run as it is, with a guard on every engine that it makes."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType

from ds_toolkit.errors import ToolkitError
from ds_toolkit.integrations.guarding import Guards
from ds_toolkit.integrations.local_environment import apply_ignored_variables
from ds_toolkit.integrations.on_import import when_imported

DEFAULT_DIRECTORY = "checkpoints"
_FAILURE = 2


@dataclass(frozen=True)
class Launch:
    """What is to be run.

    Attributes:
        script: path of the training script, as it was given.
        arguments: what it finds behind its name in `sys.argv`.
        directory: of the checkpoints.
    """

    script: str
    arguments: tuple[str, ...]
    directory: Path


def main(arguments: list[str]) -> None:
    """Run a script; ends as the script ends: its exit code, its traceback."""
    launch = parse(arguments)
    try:
        apply_ignored_variables()
        if not Path(launch.script).is_file():
            raise ToolkitError("there is no such training script", where=launch.script)
    except ToolkitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_FAILURE)
    guards = Guards(launch.directory)
    when_imported("deepspeed", guards.put_around_initialize)
    _show_tracebacks_of_the_script()
    try:
        run_script(launch)
    except SystemExit as end:
        if end.code not in (None, 0):
            guards.leave(end)
            raise
        guards.close()
        raise
    # Every other exception goes through: it is printed first, and last words come at the process's end.
    guards.close()


def parse(arguments: list[str]) -> Launch:
    """Read a command line; one that is wrong ends the process with 2.

    DeepSpeed's launcher puts `--local_rank=N` before all else; the script gets it as its first argument, as
    it would without us.
    """
    parser = argparse.ArgumentParser(
        prog="ds_toolkit.launch",
        usage="deepspeed --module ds_toolkit.launch [--checkpoint-dir D] train.py ARGS",
        description="Run a training script with a CheckpointGuard on every engine that it makes.",
        allow_abbrev=False,
    )
    parser.add_argument("--local_rank", "--local-rank", metavar="N", help="from the launcher, for the script")
    parser.add_argument(
        "--checkpoint-dir",
        metavar="D",
        default=DEFAULT_DIRECTORY,
        help="where checkpoints go (default: %(default)s)",
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    known = parser.parse_args(arguments)
    of_the_launcher = [] if known.local_rank is None else [f"--local_rank={known.local_rank}"]
    return Launch(
        script=known.script,
        arguments=(*of_the_launcher, *known.arguments),
        # Now: the script may go to another folder.
        directory=Path(known.checkpoint_dir).absolute(),
    )


def run_script(launch: Launch) -> None:
    """Run the script as `__main__`, as `python train.py` does.

    `__main__` stays the script's when it has ended, unlike with runpy: what is saved then may be pickled, and
    its classes are looked up there.
    """
    path = Path(launch.script).absolute()
    sys.argv[:] = [launch.script, *launch.arguments]
    if not getattr(sys.flags, "safe_path", False):
        # In the place of the folder that `-m` has put there.
        sys.path[0] = str(path.resolve().parent)
    module = ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    vars(module).update(__file__=str(path), __builtins__=builtins, __loader__=loader)
    sys.modules["__main__"] = module
    _execute(path, module)


def _execute(path: Path, module: ModuleType) -> None:
    with io.open_code(str(path)) as file:
        source = file.read()
    exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))  # noqa: S102


def _show_tracebacks_of_the_script() -> None:
    """Let tracebacks begin in the script, as if we were not there."""
    original = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        own = traceback
        while own is not None and own.tb_frame.f_code is not _execute.__code__:
            own = own.tb_next
        if own is not None:
            traceback = own.tb_next
        original(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = show
