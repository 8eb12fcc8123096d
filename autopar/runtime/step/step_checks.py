"""Checks of a training step. On request, in one step of several: that the loss is a number, and that copies of a parameter or
buffer have not drifted apart on the ranks that hold them, which compare checksums.

Always: a backward through weights that have changed since its forward is found, as autograd does for the tensors that it has
saved. Programs save parts and gathered copies of the parameters, of which autograd keeps no versions. A backward that reaches
other parameters only (of two optimizers, one has made its step) is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from ..comm.agreement import gather
from ..compat.autograd import at_end_of_backward, in_backward
from ..compat.dtensor import local_of
from ..device.groups import several_ranks
from ..device.mesh import PIPELINE_AXIS
from ..errors import NotFiniteProblem, ReplicaProblem, RuntimeProblem
from ..module import BlockModule, Program
from ..state.model_state import State
from .micro_batches import StepResult
from .same_batch import checksum_on_device

_ABSENT = -(2**62)
"""The number that ranks without the tensor have in place of a checksum."""
_MOST_COMPARED = 1 << 22
"""Elements of a tensor whose values are compared where checksums differ."""
_NAMED = 4


class _Copy(NamedTuple):
    """The part of a parameter or buffer that this rank holds, and the axes along which other ranks hold the same."""

    tensor: torch.Tensor
    axes: frozenset[str]


class _Held(NamedTuple):
    """Ranks with equal `shard` hold copies of one tensor."""

    shard: tuple[int, ...]
    checksum: int


def _copies(state: State) -> Iterator[tuple[str, _Copy]]:
    """Yield the copies by name: parameters (also of other stages that hold them), and buffers, which all ranks of a stage
    hold."""
    axes = list(state.mesh.state_axes)
    for name, parameter in state.parameters.items():
        assert isinstance(parameter, DTensor)
        same = {axis for axis, placement in zip(axes, parameter.placements, strict=True) if isinstance(placement, Replicate)}
        yield name, _Copy(parameter.to_local(), frozenset((*same, PIPELINE_AXIS)))
    for name, buffer in state.buffers.items():
        yield name, _Copy(buffer, frozenset(axes))


@torch.no_grad()
def check_replicas(state: State, when: str) -> None:
    """Raise a ReplicaProblem on all ranks where copies differ in any bit. One small all-reduce for each mesh axis, and one of a
    flag; all ranks must call."""
    mesh, names = state.mesh, list(state.index.specs)
    held = dict(_copies(state))
    sums = torch.full((len(names),), _ABSENT, dtype=torch.int64, device=mesh.device)
    here = [number for number, name in enumerate(names) if name in held]
    if here:
        own_sums = torch.stack([checksum_on_device(held[names[number]].tensor) for number in here]) & (2**62 - 1)
        sums[torch.tensor(here, device=mesh.device)] = own_sums
    present = sums != _ABSENT
    both = torch.stack([sums, torch.where(present, -sums, sums)])
    differs = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for axis, size in ({PIPELINE_AXIS: mesh.pp.size} | mesh.state_axes).items():
        if size > 1:
            most = both.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX, mesh.group(axis))
            compared = torch.tensor([name in held and axis in held[name].axes for name in names], device=mesh.device)
            differs += (compared & (most[0] != -most[1])).any()
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if bool(differs):
        _raise_difference(state, held, dict(zip(names, sums.tolist(), strict=True)), when)


def _raise_difference(state: State, held: dict[str, _Copy], sums: dict[str, int], when: str) -> None:
    """Names the tensor and the ranks."""
    mesh = state.mesh
    own = {
        name: _Held(
            tuple(_coordinate(mesh, axis) for axis in (PIPELINE_AXIS, *mesh.state_axes) if axis not in copy.axes), sums[name]
        )
        for name, copy in held.items()
    }
    every: list[dict[str, _Held]] = gather(own)
    unequal = [name for name in sums if (groups := _groups(every, name)) and any(len(set(each.values())) > 1 for each in groups)]
    name = unequal[0]
    values = next(each for each in _groups(every, name) if len(set(each.values())) > 1)
    (usual, count), *rest = Counter(values.values()).most_common()
    odd = [rank for rank, value in values.items() if value != usual]
    right = next(rank for rank, value in values.items() if value == usual)
    named = ", ".join(mesh.describe(rank) for rank in odd[:_NAMED]) + (" ..." if len(odd) > _NAMED else "")
    by = _difference(held, name, right, odd[0])
    more = f" (and of {len(unequal) - 1} more)" if len(unequal) > 1 else ""
    if count == rest[0][1]:
        text = f"{mesh.describe(right)} and {named} hold different copies of {name}{more}{by}, {when}"
    else:
        text = f"{named} of {len(values)} ranks has another copy of {name}{more} than {mesh.describe(right)}{by}, {when}"
    raise ReplicaProblem(
        f"{text}: something changed it on one rank alone (code under `if rank == 0`, a kernel that is not deterministic, faulty "
        "memory); load the last checkpoint on all ranks"
    )


def _groups(every: list[dict[str, _Held]], name: str) -> list[dict[int, int]]:
    """The checksums by rank of the ranks that should hold the same, for each shard."""
    by_shard: dict[tuple[int, ...], dict[int, int]] = {}
    for rank, table in enumerate(every):
        if name in table:
            by_shard.setdefault(table[name].shard, {})[rank] = table[name].checksum
    return list(by_shard.values())


def _difference(held: dict[str, _Copy], name: str, one: int, other: int) -> str:
    """Return the distance of two ranks' copies, in words; empty for large tensors, which are not sent."""
    own: Any = None
    if dist.get_rank() in (one, other) and held[name].tensor.numel() <= _MOST_COMPARED:
        own = held[name].tensor.detach().cpu().contiguous()
    every = gather(own)
    if every[one] is None or every[other] is None:
        return ""
    apart = (every[one].double() - every[other].double()).abs()
    return f", by up to {float(apart.max()):.2g}"


def _coordinate(mesh: Any, axis: str) -> int:
    if axis == PIPELINE_AXIS:
        return int(mesh.pp.coordinate)
    return dist.get_rank(mesh.group(axis)) if mesh.state_axes[axis] > 1 else 0


Place = tuple[int, int]
"""A block in the model's order: the position of its root, and its number there."""
Found = tuple[tuple[Place, str] | None, str]
"""A rank's first block whose output is not finite, and its first parameter that is not."""


class StepChecks:
    """The checks of one program, in the first of every `every` steps (0: never)."""

    def __init__(self, program: Program, state: State, every: int) -> None:
        self.program, self.state, self.every = program, state, every
        self.steps = 0
        self.several = several_ranks()

    def run(self, program: Program, compute: Callable[[], StepResult]) -> StepResult:
        """Return the result of `compute`, which runs `program`. ReplicaProblem before it, NotFiniteProblem after it, on all ranks
        alike."""
        if not self.every or not torch.is_grad_enabled() or in_backward():
            return compute()
        self.steps += 1
        if (self.steps - 1) % self.every:
            return compute()
        if self.several:
            check_replicas(self.state, f"before step {self.steps}")
        with self._watching_outputs(program) as finite:
            result = compute()
        self._check_loss(program, result[0].detach(), finite)
        return result

    @contextmanager
    def _watching_outputs(self, program: Program) -> Iterator[dict[Place, list[torch.Tensor]]]:
        """Yield by block whether its outputs are finite, as tensors that nobody has waited for. What has no gradient (masks) may
        be infinite."""
        finite: dict[Place, list[torch.Tensor]] = {}

        def look(place: Place, result: Any) -> None:
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
                    finite.setdefault(place, []).append(torch.isfinite(value.detach()).all())

        handles = [
            block.register_forward_hook(lambda _, __, result, place=place: look(place, result))
            for place, block in _blocks(program)
        ]
        try:
            yield finite
        finally:
            for handle in handles:
                handle.remove()

    def _check_loss(self, program: Program, loss: torch.Tensor, finite: dict[Place, list[torch.Tensor]]) -> None:
        bad = (~torch.isfinite(loss).all()).to(torch.int32)
        if self.several:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if not bool(bad):
            return
        names = {place: block.prefix or type(block).__name__ for place, block in _blocks(program)}
        first = next(((place, names[place]) for place in sorted(finite) if not all(map(bool, finite[place]))), None)
        lost = next((name for name, each in self.state.parameters.items() if not torch.isfinite(local_of(each)).all()), "")
        states: list[Found] = gather((first, lost))
        raise NotFiniteProblem(f"the loss of step {self.steps} is {float(loss):g}: {self._reason(states)}")

    def _reason(self, states: list[Found]) -> str:
        """Return the reason in words, from what each rank found."""
        describe = self.program.mesh.describe
        rank = next((rank for rank, (_, lost) in enumerate(states) if lost), None)
        if rank is not None:
            return (
                f"{states[rank][1]} was not finite before it (on {describe(rank)}): load the last checkpoint, and clip gradients "
                "or lower the learning rate"
            )
        places = {rank: first for rank, (first, _) in enumerate(states) if first is not None}
        if not places:
            return "the outputs of all blocks are finite: look at the loss and its targets"
        rank = min(places, key=lambda each: (places[each][0], each))
        return (
            f"the first block whose output is not finite is {places[rank][1]}, on {describe(rank)}, whose parameters are finite: "
            "look at the batch of that rank, and at overflow in this block"
        )


def _blocks(program: Program) -> Iterator[tuple[Place, BlockModule]]:
    for root in program.roots()[program.mesh.pp.coordinate]:
        for number, block in enumerate(root.blocks()):
            yield (root.position, number), block


def watch_weights(output: torch.Tensor, state: State) -> None:
    """Raise a RuntimeProblem at the end of the backward of `output` where it reached a parameter that has changed by then."""
    if output.grad_fn is None:
        return
    before = _versions(state)

    def begin(_: object) -> None:
        changed = [name for name, old, new in zip(state.parameters, before, _versions(state), strict=True) if old != new]
        if changed:
            gradients = {name: _version_of_gradient(state, name) for name in changed}
            at_end_of_backward(partial(at_end_of_backward, partial(_check, state, gradients)))  # after those of all others

    output.grad_fn.register_prehook(begin)


def _check(state: State, before: dict[str, tuple[int, ...]]) -> None:
    for name, gradient in before.items():
        if _version_of_gradient(state, name) != gradient:
            raise RuntimeProblem(
                f"{name} has changed (optimizer.step()?) between the forward of this loss and its backward, whose gradient may "
                "be neither that of the old weights nor of the new ones: call backward before the step, or the model once more"
            )


def _versions(state: State) -> list[int]:
    return [parameter._version for parameter in state.parameters.values()]


def _version_of_gradient(state: State, name: str) -> tuple[int, ...]:
    gradient = state.parameters[name].grad
    return () if gradient is None else (id(gradient), gradient._version, local_of(gradient)._version)
