"""What docs/hangs.md says is what the code says."""

from __future__ import annotations

import re

import jobs
import pytest

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian import ending, hang_wording, hangs, stacks
from ds_toolkit.guardian.control import Phase
from ds_toolkit.guardian.hang_wording import Standstill, in_words
from ds_toolkit.guardian.stacks import Frame, Stacks
from ds_toolkit.resilience.loop_aids import check_counts

PAGE = (jobs.REPOSITORY / "docs" / "hangs.md").read_text()
TEXT = " ".join(PAGE.split())
BLOCKS = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(
    "said",
    [
        f"the median step of the last {hangs._KEPT_STEPS}, at least {hangs.LEAST_SECONDS:.0f} s",
        f"{hangs.UNMEASURED_SECONDS:.0f} s until a step was timed",
        f"SIGKILL {ending.GRACE_SECONDS:.0f} s later",
        f"SIGRTMIN + {stacks._SIGNALS.start - 34} or above",
    ],
)
def test_numbers_are_those_of_the_code(said: str) -> None:
    assert said in TEXT
    assert hangs.STEPS == 10


def test_the_example_of_a_hang_is_what_is_said() -> None:
    barrier = (
        Frame("/x/torch/distributed/distributed_c10d.py", "3185", "all_reduce"),
        Frame("t.py", "1", "f"),
    )
    ranks = [Standstill(rank, Phase.BACKWARD, 37, Stacks("text", barrier)) for rank in (0, 2, 3)]
    ranks.insert(1, Standstill(1, Phase.IDLE, 37, Stacks("text")))
    assert BLOCKS[0].startswith(f"HANG: nothing moved for 5 s: {in_words(ranks, 1)}\n")


def test_the_example_of_uneven_loaders_is_what_is_raised() -> None:
    with pytest.raises(ToolkitError) as caught:
        check_counts([38, 37, 38, 38])
    assert str(caught.value).split() == BLOCKS[1].split()


def test_what_it_concludes_is_worded_there() -> None:
    source = (jobs.REPOSITORY / hang_wording.__file__).read_text()
    for remark in (
        "All ranks wait at the same place",
        "All ranks of this node wait for one",
        "No rank is inside",
    ):
        assert remark in TEXT
        assert remark in source
