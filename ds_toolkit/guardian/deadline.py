"""When work is given up."""

from __future__ import annotations

import time

from ds_toolkit.errors import ToolkitError


class Deadline:
    """The moment at which work is given up; it may be brought forward by another thread."""

    def __init__(self, seconds: float = float("inf")) -> None:
        self.at = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Zero if it has passed."""
        return max(0.0, self.at - time.monotonic())

    def check(self) -> None:
        """Go on, or give up.

        Raises:
            ToolkitError: it has passed.
        """
        if time.monotonic() > self.at:
            raise ToolkitError("the time for writing a checkpoint is over")
