"""Whether the ranks that should have the same weights do have the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_toolkit.checkpoint.reading import OpenFiles
from ds_toolkit.checkpoint.tensors import Replica, StoredTensor
from ds_toolkit.convert.gathering import gather
from ds_toolkit.errors import ToolkitError

_PIECE_BYTES = 2 * 2**20
_NAMED = 5


def check_replicas(replicas: Sequence[Replica]) -> tuple[str, ...]:
    """Compare what several ranks have with what is taken, bit for bit; this reads both.

    Returns:
        A note that names tensors which differ and whose first rank's values are taken; empty if none differ.

    Raises:
        ToolkitError: a tensor differs that cannot be read then.
    """
    differing: list[str] = []
    for replica in replicas:
        if _equal(replica.kept, replica.other):
            continue
        name = replica.kept.name
        if replica.if_different is not None:
            raise ToolkitError(
                f"the tensor {name} cannot be put together from its tensor-parallel parts",
                where=replica.other.slices[0].path,
                why=replica.if_different,
            )
        if name not in differing:
            differing.append(name)
    if not differing:
        return ()
    more = f" and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
    return (
        "several ranks should have the same values of these tensors and do not; "
        f"those of the first rank were taken: {', '.join(differing[:_NAMED])}{more}",
    )


def _equal(one: StoredTensor, other: StoredTensor) -> bool:
    with OpenFiles() as files:
        pairs = zip(_pieces(one, files), _pieces(other, files), strict=True)
        return all(mine == its for mine, its in pairs)


def _pieces(tensor: StoredTensor, files: OpenFiles) -> Iterator[bytes]:
    step = max(_PIECE_BYTES // tensor.dtype.size_bytes, 1)
    for start in range(0, tensor.num_elements, step):
        count = min(step, tensor.num_elements - start)
        piece = bytearray(count * tensor.dtype.size_bytes)
        gather(tensor, start, memoryview(piece), files.read)
        yield bytes(piece)
