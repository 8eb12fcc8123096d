"""The parameters that are gathered and reduced together (one FSDP unit), as counts of elements on one device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.tensors.sizes import itemsize, shard_count
from autopar.ir.graph import Parameter
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """The matrices of a group whose updates need them whole: over all devices of the stage, wherever they are placed.

    flops: of one step of Newton-Schulz of each (three products: of the matrix with its transpose, of that with itself, and with
    the matrix).
    elements: of all of them.
    """

    flops: float = 0.0
    elements: float = 0.0


@dataclass(frozen=True, slots=True)
class StateGroup:
    """The parameters that one block call owns: what its tensor-parallel shard on one device counts, before ZeRO.

    elements: of all parameters.
    trainable: elements that train.
    tensors: number of parameters.
    buffer_bytes: buffers of the model, which ZeRO never shards.
    largest: elements of the largest parameter.
    small: how many parameters are of at most `PERSISTENT` elements.
    matrix_share: of the elements that train, those of `matrices`.
    """

    elements: float
    trainable: float
    tensors: int
    buffer_bytes: float = 0.0
    largest: float = 0.0
    small: int = 0
    matrix_share: float = 0.0
    matrices: MatrixWork = MatrixWork()

    @property
    def gathered_tensors(self) -> int:
        """Parameters of which each is gathered by itself, where a software does that: the small ones stay with all ranks."""
        return max(1, self.tensors - self.small)


PERSISTENT = 100_000
"""Elements up to which DeepSpeed keeps a parameter whole on every rank (``stage3_param_persistence_threshold``: 1e5)."""


TABLE_RATIO = 16
"""A matrix that is so many times as long as wide, or more, counts as a table of words, which scripts leave to AdamW."""


def is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a plan takes a parameter of this shape for one that is updated as a whole matrix."""
    return len(shape) == 2 and max(shape) < TABLE_RATIO * min(shape)


def matrix_work(parameters: Collection[Parameter]) -> tuple[float, MatrixWork]:
    """Return the share of matrices in the elements that train, and their work."""
    trained = flops = elements = 0.0
    for parameter in parameters:
        shape = [size for size in parameter.value.shape if isinstance(size, int)]
        if parameter.buffer or not parameter.trainable:
            continue
        trained += prod(shape)
        if is_matrix(shape):
            flops += 4 * prod(shape) * min(shape) + 2 * min(shape) ** 3
            elements += prod(shape)
    return elements / trained if trained else 0.0, MatrixWork(flops, elements)


def stored_elements(parameter: Parameter, precision: Precision) -> float:
    """Return the elements of a parameter, in those of the master dtype: integers (weights of 4 or 8 bits) are stored and gathered
    as they are, and count by their bytes. Of a buffer its own elements."""
    count, dtype = prod(size for size in parameter.value.shape if isinstance(size, int)), parameter.value.dtype
    return count * itemsize(dtype) / itemsize(precision.master) if "int" in dtype and not parameter.buffer else count


def state_group(parameters: Iterable[tuple[Parameter, Placements]], mesh: Mesh, precision: Precision) -> StateGroup:
    """Return the group of these parameters, each with the placements that it is stored in."""
    elements = trainable = buffers = largest = 0.0
    tensors = small = 0
    parameters = list(parameters)
    for parameter, placements in parameters:
        count = stored_elements(parameter, precision) / shard_count(placements, mesh.sizes)
        if parameter.buffer:
            buffers += count * itemsize(parameter.value.dtype)
            continue
        elements += count
        tensors += 1
        small += count <= PERSISTENT
        trainable += count if parameter.trainable else 0.0
        largest = max(largest, count)
    share, matrices = matrix_work([parameter for parameter, _ in parameters])
    return StateGroup(elements, trainable, tensors, buffers, largest, small, share, matrices)
