"""DeepSpeed's own parser, for any number of ranks and without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from deepspeed_parser import ReadRecorder, parser


@pytest.fixture(scope="session")
def deepspeed() -> ModuleType:
    import deepspeed
    import deepspeed.runtime.config
    import deepspeed.runtime.zero.config

    return deepspeed


@pytest.fixture(scope="session")
def parse() -> Iterator[Callable[..., Any]]:
    """`parse(data, world_size=1)`: DeepSpeed's parser for a number of data-parallel ranks."""
    with parser() as parse:
        yield parse


@pytest.fixture(scope="session")
def recorder() -> type[ReadRecorder]:
    """A dict that notes each key that is asked for, in `asked`."""
    return ReadRecorder
