"""Weights as a file of `torch.save`: loads with `torch.load(weights_only=True)`, also with `mmap=True`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_toolkit.checkpoint.archive_layout import ArchiveLayout
from ds_toolkit.convert.writers import Layout, OutputTensor
from ds_toolkit.convert.writers.state_dict_pickle import pickled_state_dict


class BinWriter:
    """Laid out without torch, whose import takes longer than copying a gigabyte; aliases share a storage."""

    needs_checksums = True

    def __init__(self) -> None:
        self._archive = ArchiveLayout(())
        self._storage_names: Sequence[str] = ()
        self._pickled = b""

    def lay_out(
        self,
        path: Path,
        tensors: Sequence[OutputTensor],
        names: Sequence[str],
        aliases: Mapping[str, str],
    ) -> Layout:
        """A sparse file of the final size; what stands around the tensors holds their CRCs, so comes last."""
        by_name = {tensor.name: tensor for tensor in tensors}
        sources = {name: aliases.get(name, name) for name in names}
        self._storage_names = list(dict.fromkeys(sources.values()))
        keys = {name: key for key, name in enumerate(self._storage_names)}
        self._archive = ArchiveLayout([by_name[name].num_bytes for name in self._storage_names])
        self._pickled = pickled_state_dict(
            {name: by_name[source] for name, source in sources.items()},
            {name: keys[source] for name, source in sources.items()},
        )
        size_bytes = self._archive.tail_offset_bytes + len(self._archive.tail(self._pickled))
        with path.open("wb") as file:
            file.truncate(size_bytes)
        offsets = dict(zip(self._storage_names, self._archive.offsets_bytes, strict=True))
        return Layout(offsets, size_bytes)

    def finish(self, path: Path, checksums: Mapping[str, int]) -> None:
        """Write what names the tensors: a header before each, the pickle and the directory behind them."""
        crcs = {key: checksums.get(name, 0) for key, name in enumerate(self._storage_names)}
        with path.open("r+b", buffering=0) as file:
            for key, crc32 in crcs.items():
                start, header = self._archive.header(key, crc32)
                file.seek(start)
                file.write(header)
            file.seek(self._archive.tail_offset_bytes)
            file.write(self._archive.tail(self._pickled, crcs))
