"""Finds ranks that pass different batches where they must pass equal ones: a checksum of every input, compared now and then; and
ranks that go on with the outputs in different ways: so are the gradients that come back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..device.groups import several_ranks, shared_group
from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import BatchError, MismatchProblem

FIRST_CALLS = 3
_SAME_GRADIENT = 0.01
"""The part of a gradient's norm by which it may differ between ranks: bfloat16 has as many digits."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x5851F42D4C957F2D


def is_checked(call: int, every: int) -> bool:
    """Return whether the batches of this call (from 0) are compared: the first ones, then one of `every`; none where that is
    0."""
    return bool(every) and (call < FIRST_CALLS or call % every == 0)


def checksum(tensor: torch.Tensor) -> int:
    """Return `checksum_on_device` as a number."""
    return int(checksum_on_device(tensor))


def checksum_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 of the bits, of rows and columns by their place: equal tensors have equal ones, and no copy of the tensor is made.
    Another order of examples or of positions changes it."""
    bits = tensor.detach().contiguous()
    if bits.is_complex():
        bits = torch.view_as_real(bits)
    words = bits.view(_WORDS[bits.element_size()]) if bits.dim() else bits.reshape(1).view(_WORDS[bits.element_size()])
    table = words.reshape(words.shape[0], -1) if words.numel() else words.new_zeros(1, 1)
    total = torch.zeros((), dtype=torch.int64, device=table.device)
    for dim in (0, 1):
        sums = table.sum(dim, dtype=torch.int64)
        places = torch.arange(1, 2 * sums.numel(), 2, device=table.device) * _MULTIPLIER
        total += (sums * places).sum()
    return total ^ hash(tuple(tensor.shape)) >> 1


def check_same_batch(mesh: MeshHandle, inputs: Mapping[str, torch.Tensor] | None, names: tuple[str, ...], local: bool) -> None:
    """Raise a BatchError on every rank where ranks passed different batches. All ranks call it; one that refused its own batch
    passes None. A `local` batch is this data rank's part, equal along the other axes only."""
    if not several_ranks():
        return
    own = [1, *(0 for _ in names)]
    if inputs is not None:  # of a DTensor ranks hold different shards
        own = [0, *(0 if isinstance(inputs[name], DTensor) else checksum(inputs[name]) for name in names)]
    row = torch.tensor(own, dtype=torch.int64, device=mesh.device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    checksums = [tuple(each.tolist()) for each in rows]
    refused = next((rank for rank, each in enumerate(checksums) if each[0]), None)
    if inputs is None:
        return
    if refused is not None:
        raise BatchError(
            f"{mesh.describe(refused)} refused its batch: see its own error, and pass the global batch on every rank"
        )
    first: dict[int, int] = {}
    for rank, each in enumerate(checksums):
        other = first.setdefault(mesh.data_coordinate(rank) if local else 0, rank)
        different = next((name for name, a, b in zip(names, checksums[other][1:], each[1:], strict=True) if a != b), None)
        if different is not None:
            raise BatchError(_message(mesh, different, (other, rank), local))


def compare_gradient(mesh: MeshHandle, output: torch.Tensor, path: str) -> None:
    """Raise a MismatchProblem in the backward of `output`, on every rank, where its gradient differs between ranks by more than
    kernels that add in another order do. `path`: of the output in the model's result, empty for the loss."""
    if not several_ranks() or output.grad_fn is None:
        return
    group = shared_group("gradients", backend="gloo")  # a rank that leaves the backward out is in a collective of another

    def check(gradients: tuple[torch.Tensor, ...]) -> None:
        row = torch.zeros(2, dtype=torch.float64)
        if gradients[0] is not None and not isinstance(gradients[0], DTensor):  # that of a penalty is one on all ranks
            flat = gradients[0].detach().flatten().double()
            slope = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
            row = torch.stack([flat.norm(), (flat * slope).sum()]).cpu()
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row, group)
        every = torch.stack(rows)
        apart = (every - every[0]).abs().amax(1) > _SAME_GRADIENT * every[:, 0].amax()
        if every.isfinite().all() and apart.any():
            one, other = (mesh.describe(rank) for rank in (0, int(apart.int().argmax())))
            raise MismatchProblem(
                f"{one} and {other} went on with {path or 'the loss'} in different ways: outside of the model every rank has the "
                "whole batch, so draw random numbers there alike on all ranks (torch.manual_seed(seed), without the rank), and "
                "leave factors of a rank out"
            )

    output.grad_fn.register_prehook(check)


def _message(mesh: MeshHandle, name: str, ranks: tuple[int, int], local: bool) -> str:
    one, other = (mesh.describe(rank) for rank in ranks)
    if local:
        return (
            f"{one} and {other} passed different parts (input {name}), and have the same place on {DATA_AXIS}: "
            "take the part from parallel.sampler(dataset), which gives ranks of the other axes equal ones"
        )
    return (
        f"{one} and {other} passed different batches (input {name}): pass the global batch on every rank, or each rank's own "
        "part with parallel(parallel.local_batch(**batch)) and a loader over parallel.sampler(dataset)"
    )
