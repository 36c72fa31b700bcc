"""Weights as a `.safetensors` file, written without torch.

Format (github.com/huggingface/safetensors, README, "Format"): 8 bytes with the header's length,
little-endian; the header, JSON, padded with blanks; the tensors' bytes without gaps, their offsets counted
from the header's end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_toolkit.convert.writers import Layout, OutputTensor
from ds_toolkit.errors import ToolkitError

METADATA = "__metadata__"
_HEADER_ALIGNMENT_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


class SafetensorsWriter:
    """Each tensor once; names of tied weights are recorded in the metadata, as `alias: name`."""

    needs_checksums = False

    def lay_out(
        self,
        path: Path,
        tensors: Sequence[OutputTensor],
        names: Sequence[str],
        aliases: Mapping[str, str],
    ) -> Layout:
        """Write the header and give the file its size.

        Raises:
            ToolkitError: a tensor has a name or a dtype that the format cannot hold.
        """
        # Widest elements first: every tensor is then aligned to its element size without gaps.
        by_name = {tensor.name: tensor for tensor in tensors}
        in_order = [by_name[name] for name in names if name in by_name]
        ordered = sorted(in_order, key=lambda tensor: -tensor.dtype.size_bytes)
        header: dict[str, object] = {METADATA: {**aliases, "format": "pt"}}
        starts = {}
        position = 0
        for tensor in ordered:
            starts[tensor.name] = position
            header[tensor.name] = _entry(tensor, position)
            position += tensor.num_bytes
        encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT_BYTES)
        if len(encoded) > MAX_HEADER_BYTES:
            raise ToolkitError("the model has too many tensors for one safetensors file", where=path)
        data_start = 8 + len(encoded)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(data_start + position)
        offsets = {name: data_start + start for name, start in starts.items()}
        return Layout(offsets, data_start + position)

    def finish(self, path: Path, checksums: Mapping[str, int]) -> None:
        """Nothing: the file is complete when its tensors are."""


def _entry(tensor: OutputTensor, position: int) -> dict[str, object]:
    code = CODES.get(tensor.dtype.name)
    if code is None or tensor.name == METADATA:
        raise ToolkitError(
            f"a safetensors file cannot hold the tensor {tensor.name} of dtype {tensor.dtype}",
            fix="write a .bin file",
        )
    data_offsets = [position, position + tensor.num_bytes]
    return {"dtype": code, "shape": list(tensor.shape), "data_offsets": data_offsets}
