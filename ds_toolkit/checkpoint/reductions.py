"""The few calls that a checkpoint's pickle may ask for and get: each becomes plain data, none is made.

What torch's `_rebuild_*` functions are given is stated in torch/_utils.py, and in `__reduce_ex__` and
`_reduce_ex_internal` of torch/_tensor.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds_toolkit.checkpoint.dtypes import DType

_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**62


@dataclass(frozen=True)
class Global:
    """The name of a class or function; the thing itself is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Inert:
    """An object that was not made: whose call it would have been, with what, and what was put into it."""

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None
    items: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class StorageRecord:
    """A storage: the member `data/<key>` of the archive, holding `num_elements` of `dtype`.

    The format before torch 1.6 knows views of storages: `num_viewed` elements from element `first` on.
    """

    dtype: DType
    key: str
    num_elements: int
    first: int
    num_viewed: int


@dataclass(frozen=True)
class TensorRecord:
    """A tensor that was not loaded; offset and strides count elements of `dtype`, not bytes."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage: StorageRecord
    storage_offset: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor (not of its storage)."""
        return math.prod(self.shape)

    @property
    def num_spanned(self) -> int:
        """Elements of the storage from the tensor's first to its last; those of others between them count."""
        if self.num_elements == 0:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements follow each other in row-major order, so that it is one byte range."""
        expected = 1
        if self.num_elements == 0:
            return True
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


# Makes plain data of a call's arguments. A TypeError says that they are not those of plain data, and leaves
# the call inert; a ValueError, that they cannot be true.
Reduction = Callable[..., Any]


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, *_: Any) -> Any:
    if not isinstance(storage, StorageRecord):
        raise TypeError("a tensor has no storage")
    return _checked(storage.dtype, shape, strides, storage, offset)


def _tensor_with_dtype(
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    _meta: Any = None,
) -> Any:
    if not isinstance(storage, StorageRecord) or not isinstance(dtype, DType):
        raise TypeError("a tensor has no storage or no dtype")
    return _checked(dtype, shape, strides, storage, offset)


def _checked(dtype: DType, shape: Any, strides: Any, storage: StorageRecord, offset: Any) -> TensorRecord:
    """A tensor whose every element lies inside its storage.

    Raises:
        ValueError: it does not, or its shape is absurd.
    """
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError("a tensor has no proper shape")
    numbers = (*shape, *strides, offset)
    if len(shape) != len(strides) or not all(isinstance(n, int) and 0 <= n <= _MAX_ELEMENTS for n in numbers):
        raise ValueError("a tensor has no proper shape")
    record = TensorRecord(dtype, shape, strides, storage, offset)
    if record.num_elements:
        available_bytes = storage.num_viewed * storage.dtype.size_bytes
        if (offset + record.num_spanned) * dtype.size_bytes > available_bytes:
            raise ValueError(
                f"a tensor of shape {shape} reaches beyond its storage of {available_bytes} bytes"
            )
    return record


def _typed_tensor(function: Any, _type: Any, arguments: Any, _state: Any) -> Any:
    # A tensor with attributes of its own, or of a subclass: the tensor in it, if it is an ordinary one.
    reduction = REDUCTIONS.get(function) if isinstance(function, Global) else None
    if reduction not in (_tensor, _tensor_with_dtype) or not isinstance(arguments, tuple):
        return Inert(function, (arguments,))
    return reduction(*arguments)


def _first(value: Any, *_rest: Any) -> Any:
    return value


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    if not isinstance(pairs, list | tuple) or pairs:
        raise TypeError("a dict is made in a way that pickle does not use")
    return {}


def _size(sizes: Any = ()) -> tuple[int, ...]:
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int) for size in sizes):
        raise TypeError("a torch.Size is not made of numbers")
    return tuple(sizes)


def _scalars(values: Any = ()) -> list[Any]:
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, str | int | float | bytes | None) for value in values
    ):
        raise TypeError("a set holds what is not a plain value")
    return list(values)


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    # How protocol 2, torch's default, writes bytes.
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise TypeError("bytes are written in a way that pickle does not use")
    return text.encode("latin1")


def _complex(real: Any, imaginary: Any) -> complex:
    return complex(float(real), float(imaginary))


def _builtin(name: str, reduction: Reduction) -> dict[Global, Reduction]:
    # `__builtin__` is Python 2's name, which protocol 2 keeps.
    return {Global(module, name): reduction for module in ("builtins", "__builtin__")}


REDUCTIONS: dict[Any, Reduction] = {
    Global("collections", "OrderedDict"): _dict,
    Global("torch._utils", "_rebuild_tensor_v2"): _tensor,
    Global("torch._utils", "_rebuild_tensor_v3"): _tensor_with_dtype,
    Global("torch._utils", "_rebuild_parameter"): _first,
    Global("torch._utils", "_rebuild_parameter_with_state"): _first,
    Global("torch._tensor", "_rebuild_from_type_v2"): _typed_tensor,
    Global("torch", "Size"): _size,
    Global("_codecs", "encode"): _encoded,
    **_builtin("set", lambda values=(): set(_scalars(values))),
    **_builtin("frozenset", lambda values=(): frozenset(_scalars(values))),
    **_builtin("complex", _complex),
    **_builtin("bytes", lambda: b""),
}
