"""Where the guard speaks: the logger `ds_toolkit`, heard even where nobody configures logging."""

from __future__ import annotations

import logging

from ds_toolkit.resilience import agreement

logger = logging.getLogger("ds_toolkit")


def on_rank_0(level: int, message: str, *values: object) -> None:
    """Say something once for the run, and not once a rank."""
    if agreement.rank() == 0:
        logger.log(level, message, *values)


def make_heard() -> None:
    """Give the logger a handler of its own, at INFO, if nobody has configured logging.

    A library leaves that to the program as a rule; but a checkpoint that was passed over, or a line for each
    one saved, must not depend on a training script that never heard of `logging`.
    """
    if logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [ds_toolkit] %(message)s"))
    logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
