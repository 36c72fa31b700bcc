"""The pickle of a state dict, written without torch: what `torch.save` puts into `data.pkl`.

Format: protocol 2 of Python's pickle (the comments in Lib/pickletools.py); what stands for a tensor
is stated in `_reduce_ex_internal` of torch/_tensor.py, and for a storage in `persistent_id` of
torch/serialization.py.
Types that torch has no typed storage for (8-bit floats, unsigned integers beyond 8 bits) are said beside an
untyped one.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

from ds_toolkit.checkpoint.dtypes import STORAGE_DTYPES
from ds_toolkit.convert.writers import OutputTensor

_STORAGE_CLASSES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if name != "UntypedStorage"}
_LARGEST_INT = 2**31 - 1


def pickled_state_dict(tensors: Mapping[str, OutputTensor], keys: Mapping[str, int]) -> bytes:
    """A dict from names to contiguous tensors on the CPU, each the whole of its storage.

    Args:
        tensors: by name, in the order of the state dict.
        keys: for each name the number of its storage; names of the same number share it.
    """
    entries = b"".join(_text(name) + _tensor(tensor, keys[name]) for name, tensor in tensors.items())
    return pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK + entries + pickle.SETITEMS + pickle.STOP


def _tensor(tensor: OutputTensor, key: int) -> bytes:
    storage_class = _STORAGE_CLASSES.get(tensor.dtype)
    if storage_class is None:
        storage, size = _global("torch.storage", "UntypedStorage"), tensor.num_bytes
    else:
        storage, size = _global("torch", storage_class), tensor.num_bytes // tensor.dtype.size_bytes
    named = _tuple([_text("storage"), storage, _text(str(key)), _text("cpu"), _integer(size)])
    arguments = [
        named + pickle.BINPERSID,
        _integer(0),
        _integers(tensor.shape),
        _integers(_strides(tensor.shape)),
        pickle.NEWFALSE,
        _global("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE,
    ]
    if storage_class is None:
        arguments.append(_global("torch", tensor.dtype.name))
    rebuild = "_rebuild_tensor_v3" if storage_class is None else "_rebuild_tensor_v2"
    return _global("torch._utils", rebuild) + _tuple(arguments) + pickle.REDUCE


def _strides(shape: Sequence[int]) -> list[int]:
    """In elements, row-major; torch counts a dimension of no elements as one."""
    if not shape:
        return []
    return list(accumulate((max(size, 1) for size in reversed(shape[1:])), mul, initial=1))[::-1]


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _tuple(items: Sequence[bytes]) -> bytes:
    return pickle.MARK + b"".join(items) + pickle.TUPLE


def _integers(values: Sequence[int]) -> bytes:
    return _tuple([_integer(value) for value in values])


def _integer(value: int) -> bytes:
    """Of no sign."""
    if value <= _LARGEST_INT:
        return pickle.BININT + struct.pack("<i", value)
    encoded = pickle.encode_long(value)
    return pickle.LONG1 + bytes([len(encoded)]) + encoded
