"""Runs one rank's actions of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..comm.p2p import PendingReceive, PointToPoint
from ..compat.autograd import alias, apply
from ..errors import RuntimeProblem
from ..state.loss_scale import LossScale
from ..step.micro_batches import split_result
from .gradient_reductions import GradientReductions
from .stage_modules import BACKWARD, COMPUTE, FORWARD_ONLY, BoundaryTensor, ModelChunk, PipelineProgram, RankAction

Batch = Mapping[str, torch.Tensor]
Values = list[torch.Tensor | None]
TAGS_PER_BOUNDARY = 256
"""The most tensors on one boundary: tags of two messages are this far apart."""


class _SavedForBackward(NamedTuple):
    """The tensors that the forward of a micro-batch saves for its backward: where gradients of received tensors go, and the
    gradient edge of each result that has a gradient (None: it has no graph)."""

    inputs: list[InputGradient]
    results: list[GradientEdge | None]


class Executor:
    """Runs the schedule of one program; `run` is one step. `trace`: the compute actions of the last step in order; `doing`: the
    current action; `outputs`: what the last model chunk returned beside the losses, by micro-batch."""

    def __init__(self, program: PipelineProgram, reductions: GradientReductions, p2p: PointToPoint | None = None) -> None:
        self.program, self.reductions = program, reductions
        self.p2p = p2p or PointToPoint.connect(program.mesh, program.chunk_stages, overlapping=program.weight_versions > 1)
        self.chunks = {chunk.position: chunk for chunk in program.own_chunks}
        self.last_backward = {action.chunk: action for action in program.actions if action.kind in BACKWARD}
        self.split_backwards = {(action.chunk, action.micro_batch) for action in program.actions if action.kind == "I"}
        self.trace: list[str] = []
        self.outputs: dict[int, Sequence[torch.Tensor]] = {}
        self.doing = ""
        self.loss_scale: LossScale | None = None

    def run(self, micro_batches: Sequence[Batch], totals: Batch) -> list[torch.Tensor]:
        """The losses of the micro-batches, if this rank has the last model chunk. Without gradients only forwards run."""
        step = StepState(self, micro_batches, totals)
        self.trace = []
        training = torch.is_grad_enabled()
        self.reductions.begin_step()
        for action in self.program.actions:
            if training or action.kind in FORWARD_ONLY:
                self.doing = str(action)
                if action.kind in COMPUTE:
                    self.trace.append(str(action))
                step.run_action(action)
        self.doing = ""
        assert not step.pending(), f"the schedule leaves {step.pending()} undone"
        self.p2p.wait_all_sent()
        if training:
            self.reductions.finish()
        return step.losses


class StepState:
    """The tensors of one step. All tables are by (chunk, micro-batch); an entry is removed when it is used."""

    def __init__(self, executor: Executor, micro_batches: Sequence[Batch], totals: Batch) -> None:
        self.executor, self.program, self.p2p = executor, executor.program, executor.p2p
        self.micro_batches, self.totals = micro_batches, totals
        self.training = torch.is_grad_enabled()
        self.losses: list[torch.Tensor] = []
        self.receiving_inputs: dict[tuple[int, int], PendingReceive] = {}
        self.receiving_gradients: dict[tuple[int, int], PendingReceive] = {}
        self.inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.results: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.saved: dict[tuple[int, int], _SavedForBackward] = {}
        self.gradients: dict[tuple[int, int], Values] = {}
        self.input_gradients: dict[tuple[int, int], Values] = {}

    def pending(self) -> list[tuple[int, int]]:
        """Entries of all tables that no action has used yet."""
        tables = (
            self.receiving_inputs,
            self.receiving_gradients,
            self.inputs,
            self.results,
            self.saved,
            self.gradients,
            self.input_gradients,
        )
        return [key for table in tables for key in table]

    def run_action(self, action: RankAction) -> None:
        """Run one action."""
        chunk, kind, micro_batch = action
        reductions = self.executor.reductions.chunks[chunk]
        if kind == "F":
            self._forward(self.executor.chunks[chunk], micro_batch)
        elif kind in ("B", "I"):
            reductions.before_backward(kind, action == self.executor.last_backward[chunk])
            self._backward(self.executor.chunks[chunk], micro_batch)
            reductions.after_backward()
        elif kind == "W":
            reductions.backward_weights(micro_batch, action == self.executor.last_backward[chunk])
        elif kind == "UNSHARD":
            reductions.unshard()
        elif kind == "RESHARD":
            reductions.reshard()
        elif kind == "REDUCE_GRAD":
            reductions.reduce()
        else:
            self._communicate(action)

    # -- communication between stages

    def _tag(self, chunk: int, micro_batch: int, back: bool) -> int:
        """The first tag of the messages of a micro-batch over the boundary after `chunk`."""
        return ((micro_batch * len(self.program.chunks) + chunk) * 2 + back) * TAGS_PER_BOUNDARY

    def _communicate(self, action: RankAction) -> None:
        chunk, kind, micro_batch = action
        key, chunk_stages = (chunk, micro_batch), self.program.chunk_stages
        if kind == "SEND_F":
            results = self.results.pop(key)
            self.p2p.send(results, chunk_stages[chunk + 1], self._tag(chunk, micro_batch, False), key)
        elif kind == "RECV_F":
            buffers = [
                each.empty(self._micro_batch_size(micro_batch), self.program.mesh.device) for each in self._boundary_before(chunk)
            ]
            self.receiving_inputs[key] = self.p2p.receive(
                buffers, chunk_stages[chunk - 1], self._tag(chunk - 1, micro_batch, False)
            )
        elif kind == "SEND_B":
            gradients = self.input_gradients.pop(key)
            wanted = [each for each in self._boundary_before(chunk) if each.gradient]
            full = [self._zeros(each, micro_batch) if x is None else x for each, x in zip(wanted, gradients, strict=True)]
            self.p2p.send(full, chunk_stages[chunk - 1], self._tag(chunk - 1, micro_batch, True), None)
        else:
            wanted = [each for each in self.program.boundaries[chunk] if each.gradient]
            buffers = [each.empty(self._micro_batch_size(micro_batch), self.program.mesh.device) for each in wanted]
            self.receiving_gradients[key] = self.p2p.receive(
                buffers, chunk_stages[chunk + 1], self._tag(chunk, micro_batch, True)
            )

    def _micro_batch_size(self, micro_batch: int) -> int:
        return self.program.micro_batch_size(**self.micro_batches[micro_batch])

    def _zeros(self, boundary: BoundaryTensor, micro_batch: int) -> torch.Tensor:
        return boundary.empty(self._micro_batch_size(micro_batch), self.program.mesh.device).zero_()

    def _boundary_before(self, chunk: int) -> tuple[BoundaryTensor, ...]:
        return self.program.boundaries[chunk - 1] if chunk else ()

    # -- forward and backward

    def _forward(self, chunk: ModelChunk, micro_batch: int) -> None:
        position = chunk.position
        key, before = (position, micro_batch), self._boundary_before(position)
        received = self.inputs.pop(key, None)
        if received is None:
            received = self.receiving_inputs.pop(key).wait() if position else []
        gradients = [InputGradient() for each in before if each.gradient]
        if self.training:
            slots = iter(gradients)
            pairs = zip(received, before, strict=True)
            received = [received_tensor(x, next(slots)) if each.gradient else x.detach() for x, each in pairs]
        values = {each.name: x for each, x in zip(before, received, strict=True)}
        part = self.micro_batches[micro_batch]
        inputs = {name: part[name] if name in part else self.totals[name] for name in chunk.batch_inputs}
        chunk.weight_grads.micro_batch = micro_batch if key in self.executor.split_backwards else None
        outputs = chunk(**values, **inputs)
        if position + 1 == len(self.program.chunks):
            outputs, others = split_result(outputs)
            if others:
                self.executor.outputs[micro_batch] = others
            self.losses.append(outputs.detach())
            results = [outputs]
            if self.training and self.executor.loss_scale is not None:
                self.gradients[key] = [self.executor.loss_scale.gradient(outputs)]
            edges = [_edge(outputs)] if self.training else []
        else:
            after = self.program.boundaries[position]
            results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs or ())  # None: the next repeats all
            self._check_shapes(position, micro_batch, results)
            edges = [_edge(x) for x, each in zip(results, after, strict=True) if each.gradient] if self.training else []
            sent = [x.detach() for x in results]
            if self.program.chunk_stages[position + 1] == self.program.mesh.pp.coordinate:
                self.inputs[position + 1, micro_batch] = sent
            else:
                self.results[key] = sent
        if self.training:
            self.saved[key] = _SavedForBackward(gradients, edges)

    def _check_shapes(self, position: int, micro_batch: int, results: list[torch.Tensor]) -> None:
        """Raise a RuntimeProblem where results do not have the planned shapes, for which receives are posted."""
        after, examples = self.program.boundaries[position], self._micro_batch_size(micro_batch)
        planned = [(tuple(each.shape(examples)), getattr(torch, each.dtype)) for each in after]
        if [(tuple(x.shape), x.dtype) for x in results] != planned:
            shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in results)
            raise RuntimeProblem(f"chunk {position} makes {shapes} where {', '.join(map(str, planned))} is planned: plan again")

    def _backward(self, chunk: ModelChunk, micro_batch: int) -> None:
        position = chunk.position
        key = position, micro_batch
        saved = self.saved.pop(key)
        gradients = self._result_gradients(key, len(saved.results))
        chunk.weight_grads.micro_batch = micro_batch if key in self.executor.split_backwards else None
        pairs = [(edge, x) for edge, x in zip(saved.results, gradients, strict=True) if edge is not None]
        if position + 1 < len(self.program.chunks):
            pairs = [(edge, x) for edge, x in pairs if x is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [x for _, x in pairs])
        back = [each.value for each in saved.inputs]
        if position and self.program.chunk_stages[position - 1] == self.program.mesh.pp.coordinate:
            self.gradients[position - 1, micro_batch] = back
        elif position:
            self.input_gradients[key] = back

    def _result_gradients(self, key: tuple[int, int], count: int) -> Values:
        """The gradients of a chunk's results."""
        if key in self.gradients:
            return self.gradients.pop(key)
        if key not in self.receiving_gradients:
            return [None] * count
        gradients: Values = list(self.receiving_gradients.pop(key).wait())
        self.p2p.wait_sent(key)
        return gradients


def _edge(x: torch.Tensor) -> GradientEdge | None:
    """Return the edge where the backward starts; the result itself need not stay alive."""
    return get_gradient_edge(x) if x.requires_grad else None


class InputGradient:
    """The gradient of one received tensor, None until the backward reaches it."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class _Received(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: InputGradient, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return alias(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (ctx.gradient.value,) = grads
        return None, None, None


def received_tensor(x: torch.Tensor, gradient: InputGradient) -> torch.Tensor:
    """Return `x` as the start of a graph, whose gradient goes to `gradient`."""
    start = torch.empty(0, device=x.device, requires_grad=True)  # what makes the result require one
    result: torch.Tensor = apply(_Received, gradient, x.detach(), start)
    return result
