"""What a snapshot copies from: the live storages of this rank's files, and when each may be copied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_toolkit.resilience.slot_files import bytes_of
from ds_toolkit.resilience.state_pickle import Pickled

# Where DeepSpeed's optimizers keep what changes in `optimizer.step` alone. What is not found here is copied
# before the training loop goes on, so a name that is missing costs time and no bit.
_MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
    "fp16_partitioned_groups_flat",
    "bit16_groups_flat",
)


@dataclass
class FileSources:
    """Of one file, by key.

    Attributes:
        storages: the bytes of each.
        steady: those that change in `optimizer.step` alone.
        frozen: weights that the optimizer does not train.
        version: another one whenever any of this is.
    """

    storages: list[torch.Tensor]
    steady: frozenset[int]
    frozen: dict[int, torch.Tensor]
    version: int


class Sources:
    """Those of all files of this rank.

    What a storage is, is asked while it is at hand, and kept by key: a storage that is gone may have left its
    address to another one.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._files: dict[str, FileSources] = {}
        self.version = 0
        """Another one whenever any file's is."""

    def __getitem__(self, name: str) -> FileSources:
        return self._files[name]

    def refresh(self, pickled: Mapping[str, Pickled]) -> None:
        """Such as the files are now."""
        if any(self._is_unknown(name, part) for name, part in pickled.items()):
            self.version += 1
            self._files = self._ask_for(pickled)
            return
        for name, part in pickled.items():
            if part.replaced:
                self.version += 1
                file = self._files[name]
                file.version = self.version
                for key in part.replaced:
                    file.storages[key] = bytes_of(part.storages[key])

    def _is_unknown(self, name: str, part: Pickled) -> bool:
        file = self._files.get(name)
        if file is None or part.is_new or len(file.storages) != len(part.storages):
            return True
        return not (file.steady.isdisjoint(part.replaced) and part.replaced.isdisjoint(file.frozen))

    def _ask_for(self, pickled: Mapping[str, Pickled]) -> dict[str, FileSources]:
        steady, frozen = steady_storages(self._engine), frozen_storages(self._engine)
        files = {}
        for name, part in pickled.items():
            identities = [storage._cdata for storage in part.storages]
            files[name] = FileSources(
                [bytes_of(storage) for storage in part.storages],
                frozenset(key for key, identity in enumerate(identities) if identity in steady),
                {key: frozen[identity] for key, identity in enumerate(identities) if identity in frozen},
                self.version,
            )
        return files


def steady_storages(engine: Any) -> set[int]:
    """Storages (their `_cdata`) that change in `optimizer.step` alone: trained weights and optimizer states.

    Frozen weights are not among them: what follows the trained ones outside of the optimizer, such as an
    average of them, looks the same.
    """
    tensors: list[torch.Tensor] = []
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            tensors += [parameter.data, getattr(parameter, "ds_tensor", parameter.data)]
    for optimizer in (engine.optimizer, getattr(engine.optimizer, "optimizer", None)):
        for state in dict(getattr(optimizer, "state", None) or {}).values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        for name in _MASTER_WEIGHTS:
            tensors += _tensors(getattr(optimizer, name, None))
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def frozen_storages(engine: Any) -> dict[int, torch.Tensor]:
    """Weights that the optimizer does not train, by the `_cdata` of their storages."""
    frozen = [parameter for parameter in engine.module.parameters() if not parameter.requires_grad]
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in frozen]
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in _tensors(inner)]
    return []
