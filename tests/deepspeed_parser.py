"""DeepSpeed's own parser, for any number of ranks and without a process group, and a dict that listens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock


class ReadRecorder(dict[str, Any]):
    """A configuration, or a section of one, that notes each key that is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: set[str] = set()

    def __copy__(self) -> ReadRecorder:
        return self

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def keys(self) -> Any:
        recorder = self

        class Keys:
            def __contains__(self, key: object) -> bool:
                return key in recorder

            def __iter__(self) -> Iterator[str]:
                return iter(list(dict.keys(recorder)))

        return Keys()


@contextlib.contextmanager
def parser() -> Iterator[Callable[..., Any]]:
    """`parse(data, world_size=1)`: DeepSpeed's parser for a number of data-parallel ranks."""
    import deepspeed.runtime.config as config
    from deepspeed.utils import logger

    def parse(data: dict[str, Any] | str, world_size: int = 1) -> Any:
        stub = SimpleNamespace(get_data_parallel_world_size=lambda: world_size)
        return config.DeepSpeedConfig(data, mpu=stub)

    # Without the log: its messages would be most of the time of thousands of calls.
    with (
        mock.patch.object(config.dist, "get_rank", return_value=0),
        mock.patch.object(logger, "disabled", True),
    ):
        yield parse
