"""Owned matrices: an update that needs a whole matrix (Muon's, by Newton-Schulz) is computed by one rank, its owner.

The ranks of a stage have parts of each matrix, or copies. The momenta of a batch of matrices go to their owners in one
all-to-all, each part from the copy that the owner is of, and the updates come back to all ranks in another one, in the dtype that
the function works in. While the owners compute one batch, the next is on its way to them, and the one before on its way back.
Parameters and momenta stay where they are. Owners are balanced by the products of the matrices, and known to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..comm.heartbeat import glancing
from ..compat.collectives import all_to_all_rows, wait_tensor
from ..compat.dtensor import MatrixPart, local_of, matrix_part, placed_like, ranks_of
from ..device.groups import members_group
from .stage_tensors import OnAnotherStage

Function = Callable[[torch.Tensor], torch.Tensor]
"""Of one whole matrix, one of its shape."""

BATCH_ELEMENTS = 2**25
"""Elements for each rank after which a batch of matrices is full."""

LARGEST_SHARE = 0.5
"""A batch is full when its largest matrix is at most this share of the work of one rank: then owners can be balanced."""


def work(shape: Sequence[int]) -> int:
    """The multiplications of the product of a matrix with its transpose, the smaller way round."""
    return prod(shape) * min(shape)


def batches_of(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], batch_elements: int = BATCH_ELEMENTS
) -> list[list[int]]:
    """Return the positions of the matrices that owners update, in batches; without those that are no shards, or only on one rank,
    or that have a gradient placed otherwise, or are on other stages of a pipeline."""
    batches: list[list[int]] = []
    mesh: DeviceMesh | None = None
    elements = total = largest = 0
    for position, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        if not _placed_alike(parameter, gradient):
            continue
        assert isinstance(parameter, DTensor)
        mesh = mesh or parameter.device_mesh
        if parameter.device_mesh != mesh:
            continue
        if not batches or (elements >= batch_elements * mesh.size() and largest <= LARGEST_SHARE * total / mesh.size()):
            batches.append([])
            elements = total = largest = 0
        batches[-1].append(position)
        cost = work(parameter.shape)
        elements, total, largest = elements + parameter.numel(), total + cost, max(largest, cost)
    return batches


def _placed_alike(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor) or parameter.dim() != 2:
        return False
    if isinstance(parameter, OnAnotherStage):
        return False
    same = parameter.placements == gradient.placements and parameter.device_mesh == gradient.device_mesh
    whole = any(each.is_partial() for each in gradient.placements)
    return same and not whole and parameter.device_mesh.size() > 1 and parameter.numel() > 0


def owners_of(shapes: Sequence[Sequence[int]], loads: list[int]) -> list[int]:
    """Return the rank that owns each matrix: the largest first, each to the rank with the least to do. `loads`: the work of the
    ranks, to which theirs is added."""
    owners = [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: (-work(shapes[index]), index)):
        owners[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += work(shapes[index])
    return owners


def updates_by_owners(batches: Iterator[list[DTensor]], function: Function) -> Iterator[list[DTensor]]:
    """Yield `function` of each batch of matrices, placed as they are. All ranks of their mesh must call, for the same ones."""
    loads: list[int] = []
    sent: _Batch | None = None
    computed: _Batch | None = None
    for batch in chain((_Batch(updates, loads, function) for updates in batches), (None, None)):
        ready, computed, sent = computed, sent and sent.compute(), batch
        if ready is not None:
            yield ready.results()


class _Batch:
    """Matrices on their way to their owners, then their updates on the way back. Ranks are places in the mesh, in order."""

    def __init__(self, updates: list[DTensor], loads: list[int], function: Function) -> None:
        mesh = updates[0].device_mesh
        loads += [] if loads else [0] * mesh.size()
        self.updates, self.function, self.group = updates, function, _group_of(mesh)
        self.places = list(product(*map(range, mesh.shape)))
        self.rank = self.places.index(tuple(mesh.get_coordinate() or ()))
        self.owners = owners_of([each.shape for each in updates], loads)
        self.owned_by: list[list[DTensor]] = [[] for _ in self.places]
        for update, owner in zip(updates, self.owners, strict=True):
            self.owned_by[owner].append(update)
        self.device = local_of(updates[0]).device
        # in which the function works: a cast before it changes nothing
        self.dtype = function(torch.zeros(1, 1, dtype=updates[0].dtype, device=self.device)).dtype
        parts = [
            [local_of(each) for each in theirs if self._sends(self.rank, each, owner)]
            for owner, theirs in enumerate(self.owned_by)
        ]
        sizes = [
            sum(prod(self._part(each, rank).shape) for each in self.owned_by[self.rank] if self._sends(rank, each, self.rank))
            for rank in range(len(self.places))
        ]
        self.arriving = self._exchange(parts, sizes)

    def _part(self, update: DTensor, rank: int) -> MatrixPart:
        return matrix_part(update, self.places[rank])

    def _sends(self, rank: int, update: DTensor, owner: int) -> bool:
        """Return whether a rank's part goes to the owner: it is of the same copy."""
        return all(
            one == other or not isinstance(placement, Replicate)
            for placement, one, other in zip(update.placements, self.places[rank], self.places[owner], strict=True)
        )

    def _exchange(self, parts: list[list[torch.Tensor]], sizes: list[int]) -> torch.Tensor:
        """Start to send `parts` to each rank, and to receive so many elements from each."""
        flat = [part.reshape(-1).to(self.dtype) for each in parts for part in each]
        sent = torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype, device=self.device)
        return all_to_all_rows(sent, sizes, [sum(part.numel() for part in each) for each in parts], self.group.group_name)

    def compute(self) -> _Batch:
        """Compute the updates of the owned matrices, and start to send each rank its parts."""
        arrived, offset, own = _wait(self.arriving), 0, self.owned_by[self.rank]
        wholes = [torch.empty_strided(each.shape, each.stride(), dtype=self.dtype, device=self.device) for each in own]
        for rank in range(len(self.places)):
            for update, whole in zip(own, wholes, strict=True):
                if self._sends(rank, update, self.rank):
                    part = self._part(update, rank)
                    end = offset + prod(part.shape)
                    part.put(whole, arrived[offset:end].view(part.shape))
                    offset = end
        results = list(map(self.function, wholes))
        parts = [
            [self._part(update, rank).of(result) for update, result in zip(own, results, strict=True)]
            for rank in range(len(self.places))
        ]
        self.arriving = self._exchange(parts, [sum(local_of(each).numel() for each in theirs) for theirs in self.owned_by])
        return self

    def results(self) -> list[DTensor]:
        """The updates, placed as the matrices are."""
        arrived = iter(_wait(self.arriving).split([local_of(each).numel() for theirs in self.owned_by for each in theirs]))
        by_owner = [iter([next(arrived) for _ in theirs]) for theirs in self.owned_by]
        parts = ((next(by_owner[owner]), update) for update, owner in zip(self.updates, self.owners, strict=True))
        return [placed_like(part.view(local_of(update).shape), update) for part, update in parts]


def _wait(raw: torch.Tensor) -> torch.Tensor:
    with glancing("the update of whole matrices"):
        return wait_tensor(raw)


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of a mesh, in order."""
    return mesh.get_group() if mesh.ndim == 1 else members_group("owned matrices", ranks_of(mesh))
