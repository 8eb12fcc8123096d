"""Runs one rank's actions of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .actions import BACKWARD, COMPUTE, FORWARD_ONLY, Action
from .errors import RuntimeProblem
from .links import Arriving, Links
from .micro_batches import apart
from .pipeline import Boundary, Chunk, Pipeline
from .reductions import Reductions

Batch = Mapping[str, torch.Tensor]
Values = list[torch.Tensor | None]
MOST_TENSORS = 256
"""On one boundary: tags of messages are this far apart."""


class _Kept(NamedTuple):
    """What a forward leaves for its backward: received values that want gradients, and where the graph begins for each result
    with a gradient (None: it has no graph)."""

    leaves: list[torch.Tensor]
    results: list[GradientEdge | None]


class Executor:
    """One for each program; `run` is one step. `trace` is what the last one computed, in order; `doing` the action of now;
    `outputs` what the last chunk returned behind the losses, by micro-batch."""

    def __init__(self, program: Pipeline, reductions: Reductions) -> None:
        self.program, self.reductions = program, reductions
        self.links = Links.between(program.mesh, program.owners)
        self.chunks = {chunk.position: chunk for chunk in program.mine}
        self.last = {action.chunk: action for action in program.actions if action.kind in BACKWARD}
        self.split = {(action.chunk, action.micro_batch) for action in program.actions if action.kind == "I"}
        self.trace: list[str] = []
        self.outputs: dict[int, Sequence[torch.Tensor]] = {}
        self.doing = ""

    def run(self, parts: Sequence[Batch], totals: Batch) -> list[torch.Tensor]:
        """The losses of the micro-batches, where this rank has the last chunk. Without gradients only forwards run."""
        step = Step(self, parts, totals)
        self.trace = []
        training = torch.is_grad_enabled()
        self.reductions.begin()
        for action in self.program.actions:
            if training or action.kind in FORWARD_ONLY:
                self.doing = str(action)
                if action.kind in COMPUTE:
                    self.trace.append(str(action))
                step.take(action)
        self.doing = ""
        assert not step.left(), f"the schedule leaves {step.left()} undone"
        self.links.finish()
        if training:
            self.reductions.finish()
        return step.losses


class Step:
    """The state of one step. All tables are by (chunk, micro-batch), and what is taken from them is gone."""

    def __init__(self, executor: Executor, parts: Sequence[Batch], totals: Batch) -> None:
        self.executor, self.program, self.links = executor, executor.program, executor.links
        self.parts, self.totals = parts, totals
        self.training = torch.is_grad_enabled()
        self.losses: list[torch.Tensor] = []
        self.arriving: dict[tuple[int, int], Arriving] = {}
        self.returning: dict[tuple[int, int], Arriving] = {}
        self.inputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.results: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.gradients: dict[tuple[int, int], Values] = {}
        self.backward_of_inputs: dict[tuple[int, int], Values] = {}

    def left(self) -> list[tuple[int, int]]:
        """What waits for an action that has not come."""
        tables = (self.arriving, self.returning, self.inputs, self.results, self.kept, self.gradients, self.backward_of_inputs)
        return [key for table in tables for key in table]

    def take(self, action: Action) -> None:
        """Does one action."""
        chunk, kind, micro_batch = action
        reductions = self.executor.reductions
        if kind == "F":
            self._forward(self.executor.chunks[chunk], micro_batch)
        elif kind in ("B", "I"):
            reductions.before(chunk, kind, action == self.executor.last[chunk])
            self._backward(self.executor.chunks[chunk], micro_batch)
            reductions.after(chunk)
        elif kind == "W":
            reductions.weights(chunk, micro_batch, action == self.executor.last[chunk])
        elif kind == "UNSHARD":
            reductions.gather(chunk)
        elif kind == "RESHARD":
            reductions.drop(chunk)
        elif kind == "REDUCE_GRAD":
            reductions.reduce(chunk)
        else:
            self._communicate(action)

    # -- what goes over boundaries

    def _tag(self, chunk: int, micro_batch: int, back: bool) -> int:
        """Of the boundary behind `chunk`."""
        return ((micro_batch * len(self.program.chunks) + chunk) * 2 + back) * MOST_TENSORS

    def _communicate(self, action: Action) -> None:
        chunk, kind, micro_batch = action
        key, owners = (chunk, micro_batch), self.program.owners
        if kind == "SEND_F":
            results = self.results.pop(key)
            self.links.send(results, owners[chunk + 1], self._tag(chunk, micro_batch, False), key)
        elif kind == "RECV_F":
            room = [each.empty(self._examples(micro_batch), self.program.mesh.device) for each in self._before(chunk)]
            self.arriving[key] = self.links.receive(room, owners[chunk - 1], self._tag(chunk - 1, micro_batch, False))
        elif kind == "SEND_B":
            given = self.backward_of_inputs.pop(key)
            wanted = [each for each in self._before(chunk) if each.gradient]
            full = [self._zeros(each, micro_batch) if x is None else x for each, x in zip(wanted, given, strict=True)]
            self.links.send(full, owners[chunk - 1], self._tag(chunk - 1, micro_batch, True), None)
        else:
            wanted = [each for each in self.program.boundaries[chunk] if each.gradient]
            room = [each.empty(self._examples(micro_batch), self.program.mesh.device) for each in wanted]
            self.returning[key] = self.links.receive(room, owners[chunk + 1], self._tag(chunk, micro_batch, True))

    def _examples(self, micro_batch: int) -> int:
        return self.program.examples(**self.parts[micro_batch])

    def _zeros(self, boundary: Boundary, micro_batch: int) -> torch.Tensor:
        return boundary.empty(self._examples(micro_batch), self.program.mesh.device).zero_()

    def _before(self, chunk: int) -> tuple[Boundary, ...]:
        return self.program.boundaries[chunk - 1] if chunk else ()

    # -- forward and backward

    def _forward(self, chunk: Chunk, micro_batch: int) -> None:
        position = chunk.position
        key, before = (position, micro_batch), self._before(position)
        received = self.inputs.pop(key, None)
        if received is None:
            received = self.arriving.pop(key).get() if before else []
        if self.training:
            received = [x.detach().requires_grad_(each.gradient) for x, each in zip(received, before, strict=True)]
        given = {each.name: x for each, x in zip(before, received, strict=True)}
        part = self.parts[micro_batch]
        taken = {name: part[name] if name in part else self.totals[name] for name in chunk.takes}
        chunk.queue.micro_batch = micro_batch if key in self.executor.split else None
        made = chunk(**given, **taken)
        leaves = [x for x, each in zip(received, before, strict=True) if each.gradient]
        if position + 1 == len(self.program.chunks):
            made, others = apart(made)
            if others:
                self.executor.outputs[micro_batch] = others
            self.losses.append(made.detach())
            results = [made]
            edges = [_edge(made)] if self.training else []
        else:
            after = self.program.boundaries[position]
            results = [made] if isinstance(made, torch.Tensor) else list(made)
            self._fits(position, micro_batch, results)
            edges = [_edge(x) for x, each in zip(results, after, strict=True) if each.gradient] if self.training else []
            gone = [x.detach() for x in results]
            if self.program.owners[position + 1] == self.program.mesh.pp.coordinate:
                self.inputs[position + 1, micro_batch] = gone
            else:
                self.results[key] = gone
        if self.training:
            self.kept[key] = _Kept(leaves, edges)

    def _fits(self, position: int, micro_batch: int, results: list[torch.Tensor]) -> None:
        """What is received has the shapes of the boundary, whatever is sent."""
        after, examples = self.program.boundaries[position], self._examples(micro_batch)
        planned = [(tuple(each.shape(examples)), getattr(torch, each.dtype)) for each in after]
        if [(tuple(x.shape), x.dtype) for x in results] != planned:
            made = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in results)
            raise RuntimeProblem(f"chunk {position} makes {made} where {', '.join(map(str, planned))} is planned: plan again")

    def _backward(self, chunk: Chunk, micro_batch: int) -> None:
        position = chunk.position
        key = position, micro_batch
        kept = self.kept.pop(key)
        given = self._given(key, len(kept.results))
        chunk.queue.micro_batch = micro_batch if key in self.executor.split else None
        pairs = [(edge, x) for edge, x in zip(kept.results, given, strict=True) if edge is not None]
        if position + 1 < len(self.program.chunks):
            pairs = [(edge, x) for edge, x in pairs if x is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [x for _, x in pairs])
        back = [leaf.grad for leaf in kept.leaves]
        if position and self.program.owners[position - 1] == self.program.mesh.pp.coordinate:
            self.gradients[position - 1, micro_batch] = back
        elif position:
            self.backward_of_inputs[key] = back

    def _given(self, key: tuple[int, int], count: int) -> Values:
        """The gradients of a chunk's results."""
        if key in self.gradients:
            return self.gradients.pop(key)
        if key not in self.returning:
            return [None] * count
        given: Values = list(self.returning.pop(key).get())
        self.links.release(key)
        return given


def _edge(x: torch.Tensor) -> GradientEdge | None:
    """Where the backward begins; the tensor itself need not live."""
    return get_gradient_edge(x) if x.requires_grad else None
