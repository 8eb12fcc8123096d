"""Checks of a training step that are made on request, in one step of several: that the loss is a number, and that copies of
parameters are equal on all ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..comm.agreement import gather
from ..compat.autograd import in_backward
from ..errors import NotFiniteProblem
from ..module import BlockModule, Program
from ..state.materialize import State
from .micro_batches import StepResult
from .replicas import check_replicas

Place = tuple[int, int]
"""A block in the model's order: the position of its root, and its number there."""
Found = tuple[tuple[Place, str] | None, str]
"""A rank's first block whose output is not finite, and its first parameter that is not."""


class StepChecks:
    """The checks of one program, in the first of every `every` steps (0: never)."""

    def __init__(self, program: Program, state: State, every: int) -> None:
        self.program, self.state, self.every = program, state, every
        self.steps = 0
        self.several = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"

    def run(self, program: Program, compute: Callable[[], StepResult]) -> StepResult:
        """What `compute` returns, which runs `program`. ReplicaProblem before it, NotFiniteProblem after it, on all ranks
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
        """Whether each block's outputs are finite, as tensors that nobody has waited for. What has no gradient (masks) may be
        infinite."""
        found: dict[Place, list[torch.Tensor]] = {}

        def look(place: Place, result: Any) -> None:
            for value in result if isinstance(result, tuple) else (result,):
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.requires_grad:
                    found.setdefault(place, []).append(torch.isfinite(value.detach()).all())

        handles = [
            block.register_forward_hook(lambda _, __, result, place=place: look(place, result))
            for place, block in _blocks(program)
        ]
        try:
            yield found
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
        lost = next((name for name, each in self.state.parameters.items() if not _is_finite(each)), "")
        said: list[Found] = gather((first, lost)) if self.several else [(first, lost)]
        raise NotFiniteProblem(f"the loss of step {self.steps} is {float(loss):g}: {self._reason(said)}")

    def _reason(self, said: list[Found]) -> str:
        """In words, from what each rank found."""
        describe = self.program.mesh.describe
        rank = next((rank for rank, (_, lost) in enumerate(said) if lost), None)
        if rank is not None:
            return (
                f"{said[rank][1]} was not finite before it (on {describe(rank)}): load the last checkpoint, and clip gradients "
                "or lower the learning rate"
            )
        places = {rank: first for rank, (first, _) in enumerate(said) if first is not None}
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


def _is_finite(parameter: torch.Tensor) -> bool:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(torch.isfinite(local.detach()).all())
