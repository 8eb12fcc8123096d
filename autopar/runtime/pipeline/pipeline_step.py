"""The steps of a program in pipeline stages: `PipelineStep` runs the schedule of one batch, and gives all ranks the same loss;
the steps of `PipeDreamStep` overlap, with two weight versions (PipeDream-2BW, arXiv 2006.09503).

There a call runs one window of the schedule: the forwards of its batch, together with the remaining backwards of the batch
before. It returns the loss of the batch *before*, whose backward hands out that batch's gradients; they belong to the weights
before the last update. `flush` finishes the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..comm.p2p import PendingSend
from ..compat.autograd import saved_tensor, storage_key
from ..compat.dtensor import local_of
from ..errors import RuntimeProblem
from ..state.model_state import State
from ..step.micro_batches import (
    Batch,
    ComputedStep,
    StepResult,
    batch_totals,
    compute_gradients,
    deliver_gradients,
    split_micro_batches,
)
from ..step.outputs import join_micro_batches
from .executor import Executor, StepState
from .gradient_reductions import ChunkReductions, GradientReductions
from .stage_modules import BACKWARD, COMPUTE, PipelineProgram, RankAction


class PipelineStep:
    """Runs the steps of this rank's stage."""

    def __init__(self, program: PipelineProgram, state: State, first: PipelineStep | None = None) -> None:
        """`first`: the step of the program that lends its weights."""
        self.program, self.state = program, state
        self.reached: dict[Any, list[str]] = {}
        if first is None:
            self.executor = Executor(program, GradientReductions(program, state))
        else:
            self.executor = Executor(program, first.executor.reductions, first.executor.p2p)

    def run(self, inputs: Batch) -> StepResult:
        """The loss of the batch, and on the last stage the outputs. Gradients are computed now, and the loss's backward hands
        them out; without gradients only forwards run."""
        if torch.is_grad_enabled() and not self.program.forward_only:
            self.state.loss_scale.begin(self.program.loss_dtype)
            self.executor.loss_scale = self.state.loss_scale
            loss, gradients, outputs = self.compute(inputs)
            return deliver_gradients(self.state, loss, gradients, self.reached), outputs
        with torch.no_grad():
            return self._run(inputs), self._outputs()

    def compute(self, inputs: Batch) -> ComputedStep:
        """Return what the schedule computes of the batch."""
        loss, gradients = compute_gradients(self.state, lambda: self._run(inputs))
        return ComputedStep(loss, gradients, self._outputs())

    def _run(self, inputs: Batch) -> torch.Tensor:
        parts = split_micro_batches(self.program, inputs)
        return _received(*_start_loss(self.program, self.executor.run(parts, batch_totals(self.program, parts))))

    def _outputs(self) -> Sequence[torch.Tensor]:
        others, self.executor.outputs = self.executor.outputs, {}
        return join_micro_batches(self.program, [others[number] for number in sorted(others)]) if others else ()


@torch.no_grad()
def _start_loss(program: PipelineProgram, losses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, dist.Work | None]:
    """Return the sum over all micro-batches, which is on its way from the last stage to every rank; half-precision losses in
    float32, as without a pipeline."""
    mesh, dtype = program.mesh, getattr(torch, program.loss_dtype)
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    loss = reduce(torch.add, losses).to(dtype) if losses else torch.zeros((), dtype=dtype, device=mesh.device)
    if mesh.pp.size == 1:
        return loss, None
    source, group = mesh.rank_in_stage(program.chunk_stages[-1]), mesh.group(mesh.pp.name)
    return loss, dist.broadcast(loss, source, group, async_op=True)


def _received(loss: torch.Tensor, work: dist.Work | None) -> torch.Tensor:
    if work is not None:
        work.wait()
    return loss


# -- two weight versions


class WeightVersions:
    """The weights of two batches. `newest`: the parameters themselves; `old`: copies of the weights that computed the batch
    before, for its remaining backwards. A saved weight is looked up when the backward needs it."""

    def __init__(self, parameters: Sequence[torch.Tensor], wanted: bool) -> None:
        self.newest = [_flat(each) for each in parameters]
        self.old = [torch.empty_like(each) for each in self.newest] if wanted else []
        self.indices = {storage_key(each): index for index, each in enumerate(self.newest)}
        self.window = 0

    def saving(self) -> saved_tensors_hooks:
        """Saved-tensor hooks around a forward."""
        return saved_tensors_hooks(self._pack, saved_tensor)

    def end_window(self) -> None:
        """End the window before the optimizer changes the newest weights."""
        with torch.no_grad():
            for old, newest in zip(self.old, self.newest, strict=False):
                old.copy_(newest)
        self.window += 1

    def _pack(self, x: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
        index = self.indices.get(storage_key(x))
        if index is None:
            return x
        return partial(self._view, index, self.window, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _view(self, index: int, window: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
        """The view of a parameter as it was in a window."""
        source = self.newest if window == self.window else self.old
        return source[index].as_strided(shape, stride, offset)


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """The whole storage of a parameter as a flat tensor."""
    data = local_of(parameter)
    return data.as_strided((data.untyped_storage().nbytes() // data.element_size(),), (1,), 0)


class _NoReductions(ChunkReductions):
    """The gradients of a model chunk accumulate without reductions, which `PipeDreamStep` starts itself."""

    def before_backward(self, kind: str, last: bool) -> None:
        pass

    def reduce(self) -> None:
        pass


class PipeDreamStep:
    """Runs the windows of this rank's stage. For replicated state (ZeRO-0) only."""

    def __init__(self, program: PipelineProgram, state: State) -> None:
        self.program, self.state = program, state
        self.reductions = GradientReductions(program, state, _NoReductions)
        self.executor = Executor(program, self.reductions)
        self.count, self.windows_run = program.micro_batches, 0
        self.carried_over = _carried_over(program.actions)
        self.versions = WeightVersions(list(state.parameters.values()), bool(self.carried_over))
        self.step = StepState(self.executor, [{} for _ in range(2 * self.count)], {})
        self.losses: list[torch.Tensor] = []
        self.partial_gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.finished_gradients: dict[nn.Parameter, torch.Tensor] = {}
        self.sent: list[PendingSend] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.state.parameters.values() if parameter.requires_grad]

    def run(self, inputs: Batch) -> StepResult:
        """Run one window, and return the loss of the batch before (zero in the first window). Without gradients, the loss of this
        batch."""
        parts = split_micro_batches(self.program, inputs)
        totals = batch_totals(self.program, parts)
        if not torch.is_grad_enabled():
            return self._evaluate(parts, totals), ()
        return deliver_gradients(self.state, *compute_gradients(self.state, lambda: self._window(parts, totals))), ()

    def flush(self) -> torch.Tensor:
        """The loss of the last batch, whose backward hands out its gradients. RuntimeProblem if there is none."""
        if not self.windows_run:
            raise RuntimeProblem("there is no batch to end: call the model before flush()")
        return deliver_gradients(self.state, *compute_gradients(self.state, self._flush))

    def _evaluate(self, parts: Sequence[Batch], totals: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forwards only; sends in flight between two windows are left alone."""
        sent, self.executor.p2p.pending_sends = self.executor.p2p.pending_sends, []
        losses = self.executor.run(parts, dict(totals))
        self.executor.p2p.pending_sends = sent
        return _received(*_start_loss(self.program, losses))

    def _window(self, parts: Sequence[Batch], totals: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._begin_window()
        first = (self.windows_run % 2) * self.count
        self.step.micro_batches = [
            *self.step.micro_batches[:first],
            *parts,
            *self.step.micro_batches[first + self.count :],
        ]
        self.step.totals = dict(totals)
        loss, work = _start_loss(self.program, self.losses)
        left = len(self.carried_over)
        if self.windows_run and not left:
            self._reduce_finished()
        for place, action in enumerate(self.program.actions):
            earlier = place in self.carried_over
            if not (earlier and not self.windows_run):
                self._run_action(action, earlier)
            left -= earlier
            if earlier and self.windows_run and not left:
                self._reduce_finished()
        self.losses, self.step.losses = self.step.losses, []
        self._end_window()
        self._release_sends()
        self.versions.end_window()
        self.windows_run += 1
        return _received(loss, work)

    def _flush(self) -> torch.Tensor:
        self._begin_window()
        for place in sorted(self.carried_over):
            self._run_action(self.program.actions[place], True)
        self._reduce_finished()
        self._release_sends()
        self._release_sends()
        loss, work = _start_loss(self.program, self.losses)
        self._end_window()
        self.losses, self.windows_run = [], 0
        return _received(loss, work)

    def _run_action(self, action: RankAction, earlier: bool) -> None:
        if action.kind in COMPUTE:
            self.executor.trace.append(str(action))
        half = (self.windows_run - earlier) % 2 * self.count
        shifted = RankAction(action.chunk, action.kind, action.micro_batch + half)
        if action.kind == "F":
            with self.versions.saving():
                self.step.run_action(shifted)
        else:
            self.step.run_action(shifted)

    # -- gradients

    def _begin_window(self) -> None:
        """Restore the gradients that the last window already computed of the batch before."""
        self.executor.trace = []
        self.reductions.begin_step()
        for parameter, gradient in self.partial_gradients.items():
            parameter.grad = gradient
        self.partial_gradients, self.finished_gradients = {}, {}

    def _reduce_finished(self) -> None:
        """The batch before is complete: starts its reductions over the data axis."""
        if self.program.mesh.dp.size > 1:
            for buckets in (self.state.buckets, *self.state.chunk_buckets):
                buckets.start_all()
            return
        self.finished_gradients = {p: p.grad for p in self.parameters if p.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None

    def _end_window(self) -> None:
        """Leave the gradients of the batch before with the parameters, and set those of this batch aside."""
        if self.program.mesh.dp.size > 1:
            for buckets in (self.state.buckets, *self.state.chunk_buckets):
                buckets.finish_started()
        else:
            self.partial_gradients = {p: p.grad for p in self.parameters if p.grad is not None}
            for parameter in self.parameters:
                parameter.grad = self.finished_gradients.get(parameter)
        if self.windows_run:
            self.reductions.reduce_tied()

    def _release_sends(self) -> None:
        """Complete the sends of the window before; the peers have received them, or will without this stage's next window."""
        p2p = self.executor.p2p
        for each in self.sent:
            each.wait()
        self.sent, p2p.pending_sends = p2p.pending_sends, []


def _carried_over(actions: Sequence[RankAction]) -> frozenset[int]:
    """Indices of actions that stand before the forward of their micro-batch: they belong to the batch before."""
    forwards = {(each.chunk, each.micro_batch): place for place, each in enumerate(actions) if each.kind == "F"}
    back = (*BACKWARD, "SEND_B", "RECV_B")
    return frozenset(
        place for place, each in enumerate(actions) if each.kind in back and place < forwards[each.chunk, each.micro_batch]
    )
