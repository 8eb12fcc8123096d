"""Finds ranks that pass different batches where they must pass equal ones: a checksum of every input, compared now and then; and
ranks that go on with the outputs in different ways: so are the gradients that come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ..comm.agreement import gather
from ..device.groups import several_ranks
from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import BatchError, MismatchProblem

FIRST_CALLS = 3
_SAME_GRADIENT = 0.01
"""The part of a gradient's norm by which it may differ between ranks: bfloat16 has as many digits."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x5851F42D4C957F2D


@dataclass
class ComparedCalls:
    """Counts calls, and chooses those in which ranks compare their batches, alike on all ranks: the first ones and one of `every`
    (none where that is 0), the first ones of each program in each mode, and the first after a change between training and
    evaluation, for which scripts take another loader. Modes that change within `FIRST_CALLS` calls, as those of actor and critic,
    are left out: comparing takes a collective."""

    every: int
    number: int = 0
    mode: Hashable = None
    calls_in_mode: int = 0

    def is_regular(self) -> bool:
        """Return whether the next call is one of the first ones, or one of `every`."""
        return bool(self.every) and (self.number < FIRST_CALLS or self.number % self.every == 0)

    def compares(self, mode: Hashable, calls_by_mode: Counter[Hashable]) -> bool:
        """Return whether the next call compares, and count it, also in the calls of its program."""
        regular, changed = self.is_regular(), mode != self.mode
        after_change = changed and self.calls_in_mode > FIRST_CALLS
        self.number, self.mode, self.calls_in_mode = self.number + 1, mode, 1 if changed else self.calls_in_mode + 1
        calls_by_mode[mode] += 1
        return regular or bool(self.every) and (after_change or calls_by_mode[mode] <= FIRST_CALLS)


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


def check_same_batch(mesh: MeshHandle, inputs: Mapping[str, torch.Tensor], local: bool, whole: Container[str] = ()) -> None:
    """Raise a BatchError on every rank where ranks passed different batches. All ranks call it. A `local` batch is this data
    rank's part, equal along the other axes only, but for the inputs that have no batch dimension (`whole`)."""
    if not several_ranks():
        return
    # of a DTensor ranks hold different shards
    own = {name: 0 if isinstance(each, DTensor) else checksum(each) for name, each in inputs.items()}
    checksums: list[dict[str, int]] = gather(own)
    first: dict[int, int] = {}
    for rank, each in enumerate(checksums):
        other = first.setdefault(mesh.data_coordinate(rank), rank)
        for name in own:
            if checksums[one := other if local and name not in whole else 0].get(name) != each.get(name):
                raise BatchError(_message(mesh, name, (one, rank), local, whole))


def record_gradient(output: torch.Tensor, path: str, found: dict[str, list[float]]) -> None:
    """Put two numbers of the gradient of `output` into `found`, once its backward has begun: its norm, and a sum by place."""

    def record(gradients: tuple[torch.Tensor | None, ...]) -> None:
        if gradients[0] is not None and not isinstance(gradients[0], DTensor):  # that of a penalty is one on all ranks
            flat = gradients[0].detach().flatten().double()
            slope = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
            found[path] = torch.stack([flat.norm(), (flat * slope).sum()]).tolist()

    if several_ranks() and output.grad_fn is not None:
        output.grad_fn.register_prehook(record)


def check_same_gradients(mesh: MeshHandle, found: Mapping[str, list[float]]) -> None:
    """Raise a MismatchProblem on every rank where gradients that came back into the program differ between ranks by more than
    kernels that add in another order do. All ranks call it, with what `record_gradient` found."""
    every = gather(dict(found)) if several_ranks() else []
    for path in sorted(set().union(*every)):
        ranks = [rank for rank, each in enumerate(every) if path in each]
        rows = torch.tensor([every[rank][path] for rank in ranks], dtype=torch.float64)
        apart = (rows - rows[0]).abs().amax(1) > _SAME_GRADIENT * rows[:, 0].amax()
        if rows.isfinite().all() and apart.any():
            one, other = (mesh.describe(ranks[at]) for at in (0, int(apart.int().argmax())))
            raise MismatchProblem(
                f"{one} and {other} went on with {path or 'the loss'} in different ways in the last step: outside of the model "
                "every rank has the whole batch, so draw random numbers there alike on all ranks (torch.manual_seed(seed), "
                "without the rank), and leave factors of a rank out"
            )


def _message(mesh: MeshHandle, name: str, ranks: tuple[int, int], local: bool, whole: Container[str]) -> str:
    one, other = (mesh.describe(rank) for rank in ranks)
    if local and name not in whole:
        return (
            f"{one} and {other} passed different parts (input {name}), and have the same place on {DATA_AXIS}: "
            "take the part from parallel.sampler(dataset), which gives ranks of the other axes equal ones"
        )
    if local:
        return (
            f"{one} and {other} passed different values of {name}, which has no batch dimension and so is one for the whole "
            "batch: pass the same on every rank (a count: that of the global batch, summed over the data ranks)"
        )
    return (
        f"{one} and {other} passed different batches (input {name}): pass the global batch on every rank, or each rank's own "
        "part with parallel(parallel.local_batch(**batch)) and a loader over parallel.sampler(dataset)"
    )
