"""Output formats: each lays a file out first, with room for the tensors, which are copied in afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ds_toolkit.checkpoint.dtypes import DType


@dataclass(frozen=True)
class OutputTensor:
    """A tensor as the file is to hold it, in row-major order."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where each tensor's bytes go, and how large the file is."""

    offsets_bytes: Mapping[str, int]
    size_bytes: int


class Writer(Protocol):
    """A format. `lay_out` comes first, then every tensor's bytes are written, then `finish`."""

    needs_checksums: bool

    def lay_out(
        self,
        path: Path,
        tensors: Sequence[OutputTensor],
        names: Sequence[str],
        aliases: Mapping[str, str],
    ) -> Layout:
        """Create the file, with nothing in it but its structure.

        Args:
            path: the file to make.
            tensors: each tensor once.
            names: all names, aliases included, in the order of the state dict.
            aliases: further names of tensors.
        """
        ...

    def finish(self, path: Path, checksums: Mapping[str, int]) -> None:
        """Complete the file; `checksums` are CRC-32 by tensor name if `needs_checksums`, else empty."""
        ...
