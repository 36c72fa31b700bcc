"""Scenarios: many small stories in one process group, each in an empty directory and judged on its own.

A worker defines them and calls `run_all`. Results go to `<root>/results_rank<R>.json`: None, or the
traceback.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from training import finish, start

from ds_toolkit import ToolkitError

SCENARIOS: dict[str, Callable[[Path], None]] = {}


def scenario(function: Callable[[Path], None]) -> Callable[[Path], None]:
    SCENARIOS[function.__name__] = function
    return function


@contextlib.contextmanager
def refused(*words: str) -> Iterator[list[ToolkitError]]:
    """The block must raise a ToolkitError whose text has all these words."""
    caught: list[ToolkitError] = []
    try:
        yield caught
    except ToolkitError as error:
        caught.append(error)
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"{missing} not in:\n{error}"
    else:
        raise AssertionError(f"nothing was refused, expected: {words}")


@contextlib.contextmanager
def said() -> Iterator[list[str]]:
    """What the logger of the toolkit says inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ds_toolkit").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ds_toolkit").removeHandler(handler)


def on_rank_0(action: Callable[[], Any]) -> None:
    """Change files while nobody looks; its failure is everybody's, so that no rank waits for another."""
    dist.barrier()
    failures: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except Exception:
            failures = [traceback.format_exc()]
    dist.broadcast_object_list(failures, src=0)
    assert failures == [None], failures[0]


def run_all() -> None:
    """Those that the command line names behind the root folder, or all of them."""
    root = Path(sys.argv[1])
    start()
    # Loud lines of many scenarios tell nothing.
    logging.getLogger("ds_toolkit").addHandler(logging.NullHandler())
    logging.getLogger("ds_toolkit").setLevel(logging.INFO)
    chosen = sys.argv[2:] or list(SCENARIOS)
    results: dict[str, str | None] = {}
    for name in chosen:
        try:
            SCENARIOS[name](root / name)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
            # At once: the other rank may wait for this one until the job is ended.
            print(f"{name} failed on rank {dist.get_rank()}\n{results[name]}", file=sys.stderr, flush=True)
        # A scenario that failed on one rank must not drag the others along.
        failed = torch.tensor([results[name] is not None], dtype=torch.int32)
        dist.all_reduce(failed)
        (root / f"results_rank{dist.get_rank()}.json").write_text(json.dumps(results))
    finish()
