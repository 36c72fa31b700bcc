"""A class as users have them, objects of which are saved with a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Settings:
    """Something that only its own code can unpickle."""

    seed: int
