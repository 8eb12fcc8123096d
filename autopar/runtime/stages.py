"""A step of a program in pipeline stages: the schedule runs, and the loss is the same on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .executor import Executor
from .micro_batches import Batch, Result, delivered, reduced, split, total
from .outputs import joined
from .pipeline import Pipeline
from .reductions import Reductions
from .state import State


class Stages:
    """Runs the steps of this rank's stage."""

    def __init__(self, program: Pipeline, state: State) -> None:
        self.program, self.state = program, state
        self.executor = Executor(program, Reductions(program, state))

    def run(self, inputs: Batch) -> Result:
        """The loss of the batch, and on the last stage the outputs. The loss's backward hands out the gradients, which are
        computed now; without gradients only forwards run."""
        parts = split(self.program, inputs)
        totals = reduced(self.program, parts)
        if not torch.is_grad_enabled():
            loss = self._loss(self.executor.run(parts, totals))
        else:
            loss = delivered(self.state, lambda: self._loss(self.executor.run(parts, totals)))
            loss = loss if loss.requires_grad else loss.requires_grad_()  # a stage without parameters that train
        others, self.executor.outputs = self.executor.outputs, {}
        return loss, joined(self.program, [others[number] for number in sorted(others)]) if others else ()

    def _loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The sum of all micro-batches on every rank."""
        mesh, dtype = self.program.mesh, getattr(torch, self.program.loss_dtype)
        with torch.no_grad():
            loss = total(losses).to(dtype) if losses else torch.zeros((), dtype=dtype, device=mesh.device)
            if mesh.pp.size > 1:
                dist.broadcast(loss, mesh.global_rank(self.program.owners[-1]), mesh.group(mesh.pp.name))
            return loss
