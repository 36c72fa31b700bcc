"""DeepSpeed's own parser, for any number of ranks and without a process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


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


@pytest.fixture(scope="session")
def deepspeed() -> ModuleType:
    import deepspeed
    import deepspeed.runtime.config
    import deepspeed.runtime.zero.config

    return deepspeed


@pytest.fixture(scope="session")
def parse(deepspeed: ModuleType) -> Iterator[Callable[..., Any]]:
    """`parse(data, world_size=1)`: DeepSpeed's parser for a number of data-parallel ranks."""
    config = deepspeed.runtime.config
    patch = pytest.MonkeyPatch()
    patch.setattr(config.dist, "get_rank", lambda: 0)
    # Its messages would be most of the time of thousands of calls.
    patch.setattr(deepspeed.utils.logger, "disabled", True)

    def parse_for(data: dict[str, Any], world_size: int = 1) -> Any:
        stub = SimpleNamespace(get_data_parallel_world_size=lambda: world_size)
        return config.DeepSpeedConfig(data, mpu=stub)

    yield parse_for
    patch.undo()


@pytest.fixture(scope="session")
def recorder() -> type[ReadRecorder]:
    """A dict that notes each key that is asked for, in `asked`."""
    return ReadRecorder
