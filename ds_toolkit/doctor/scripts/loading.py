"""DS100x: what is loaded from disk, and where to."""

from __future__ import annotations

from collections.abc import Iterator

from ds_toolkit.doctor.scripts.names import argument, takes_unknown_keywords
from ds_toolkit.doctor.scripts.registry import at, rule
from ds_toolkit.doctor.scripts.script import Script
from ds_toolkit.findings import Severity
from ds_toolkit.rules import Problem


@rule("DS1001", "load-without-a-place", Severity.WARNING)
def load_without_a_place(script: Script) -> Iterator[Problem]:
    """`torch.load` without `map_location` puts tensors back on the device that they were saved from.

    That is GPU 0 of the machine that saved them, mostly: every rank of a node then holds its copy there, and
    GPU 0 runs out of memory while the others are half empty.

    Bad:
        import deepspeed
        state = torch.load("weights.pt")
    Good:
        import deepspeed
        state = torch.load("weights.pt", map_location="cpu")
    """
    if not script.is_distributed:
        return
    for call in script.calls_named("torch.load", "torch.serialization.load"):
        if argument(call, "map_location", 1) is None and not takes_unknown_keywords(call):
            message = "every rank loads onto the GPU that the tensors were saved from, mostly GPU 0"
            yield at(call, message, 'write map_location="cpu"')
