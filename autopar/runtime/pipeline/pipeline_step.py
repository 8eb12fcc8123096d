"""One training step of a program in pipeline stages: runs the schedule, and gives all ranks the same loss."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..state.materialize import State
from ..step.micro_batches import Batch, StepResult, batch_totals, run_with_deferred_gradients, split_micro_batches, sum_losses
from ..step.outputs import join_micro_batches
from .executor import Executor
from .gradient_reductions import GradientReductions
from .stage_modules import PipelineProgram


class PipelineStep:
    """Runs the steps of this rank's stage."""

    def __init__(self, program: PipelineProgram, state: State, first: PipelineStep | None = None) -> None:
        """`first`: the step of the program that lends its weights."""
        self.program, self.state = program, state
        if first is None:
            self.executor = Executor(program, GradientReductions(program, state))
        else:
            self.executor = Executor(program, first.executor.reductions, first.executor.p2p)

    def run(self, inputs: Batch) -> StepResult:
        """The loss of the batch, and on the last stage the outputs. Gradients are computed now, and the loss's backward hands
        them out; without gradients only forwards run."""
        parts = split_micro_batches(self.program, inputs)
        totals = batch_totals(self.program, parts)
        if not torch.is_grad_enabled() or self.program.forward_only:
            with torch.no_grad():
                loss = self._loss(self.executor.run(parts, totals))
        else:
            self.state.loss_scale.begin(self.program.loss_dtype)
            self.executor.loss_scale = self.state.loss_scale
            loss = run_with_deferred_gradients(self.state, lambda: self._loss(self.executor.run(parts, totals)))
            loss = loss if loss.requires_grad else loss.requires_grad_()  # a stage without parameters that train
        others, self.executor.outputs = self.executor.outputs, {}
        return loss, join_micro_batches(self.program, [others[number] for number in sorted(others)]) if others else ()

    def _loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """The sum over all micro-batches, on every rank; half-precision losses in float32, as without a pipeline."""
        mesh, dtype = self.program.mesh, getattr(torch, self.program.loss_dtype)
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        with torch.no_grad():
            loss = sum_losses(losses).to(dtype) if losses else torch.zeros((), dtype=dtype, device=mesh.device)
            if mesh.pp.size > 1:
                dist.broadcast(loss, mesh.rank_in_stage(self.program.chunk_stages[-1]), mesh.group(mesh.pp.name))
            return loss
