"""Steps that do not wait for each other, on two versions of the weights (PipeDream-2BW, arXiv 2006.09503).

A call runs a window of the schedule: forwards of its batch, beside what backwards of the batch before are left. It returns the
loss of the batch *before*, whose backward hands out that batch's gradients; they are those of the weights before the last
update. `flush` ends the last batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from .actions import BACKWARD, COMPUTE, Action
from .compat import storage_key
from .errors import RuntimeProblem
from .executor import Executor, Step
from .links import Sent
from .micro_batches import Batch, Result, delivered, reduced, split, total
from .pipeline import Pipeline
from .reductions import Reductions
from .state import State


class _Weight(NamedTuple):
    """A piece of a parameter that a forward of a window saved."""

    place: int
    window: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Versions:
    """The newest weights are the parameters themselves. `old` are copies of those with which the batch before was computed, for
    what of it is still to come back. A saved weight is known by its place, and looked up when the backward wants it."""

    def __init__(self, parameters: Sequence[torch.Tensor], wanted: bool) -> None:
        self.live = [_flat(each) for each in parameters]
        self.old = [torch.empty_like(each) for each in self.live] if wanted else []
        self.places = {storage_key(each): index for index, each in enumerate(self.live)}
        self.window = 0

    def saving(self) -> saved_tensors_hooks:
        """Around a forward."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def end_window(self) -> None:
        """Before the optimizer changes the newest weights."""
        with torch.no_grad():
            for old, live in zip(self.old, self.live, strict=False):
                old.copy_(live)
        self.window += 1

    def _pack(self, x: torch.Tensor) -> torch.Tensor | _Weight:
        index = self.places.get(storage_key(x))
        if index is None:
            return x
        return _Weight(index, self.window, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def _unpack(self, kept: torch.Tensor | _Weight) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        source = self.live if kept.window == self.window else self.old
        return source[kept.place].as_strided(kept.shape, kept.stride, kept.offset)


def _flat(parameter: torch.Tensor) -> torch.Tensor:
    """All of its storage."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    data = local.detach()
    return data.as_strided((data.untyped_storage().nbytes() // data.element_size(),), (1,), 0)


class _Nothing(Reductions):
    """Gradients add up where they are."""

    def begin(self) -> None:
        for buckets in (self.state.buckets, *self.state.of_chunks):
            buckets.hold = True

    def before(self, chunk: int, kind: str, last: bool) -> None:
        pass

    reduce = gather = drop = lambda self, chunk: None


class Windows:
    """Runs the windows of this rank's stage. Replicated state only."""

    def __init__(self, program: Pipeline, state: State) -> None:
        self.program, self.state = program, state
        self.reductions = _Nothing(program, state)
        self.executor = Executor(program, self.reductions)
        self.many, self.count = program.micro_batches, 0
        self.before = _of_the_batch_before(program.actions)
        self.versions = Versions(list(state.parameters.values()), bool(self.before))
        self.step = Step(self.executor, [{} for _ in range(2 * self.many)], {})
        self.losses: list[torch.Tensor] = []
        self.partial: dict[nn.Parameter, torch.Tensor] = {}
        self.finished: dict[nn.Parameter, torch.Tensor] = {}
        self.sent: list[Sent] = []
        self.work: dist.Work | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.state.parameters.values() if parameter.requires_grad]

    def run(self, inputs: Batch) -> Result:
        """One window; the loss of the batch before (zero in the first one). Without gradients, the loss of this batch."""
        parts = split(self.program, inputs)
        totals = reduced(self.program, parts)
        if not torch.is_grad_enabled():
            return self._look(parts, totals), ()
        loss = delivered(self.state, lambda: self._window(parts, totals))
        return loss if loss.requires_grad else loss.requires_grad_(), ()

    def flush(self) -> torch.Tensor:
        """The loss of the last batch, whose backward hands out its gradients. RuntimeProblem where there is none."""
        if not self.count:
            raise RuntimeProblem("there is no batch to end: call the model before flush()")
        loss = delivered(self.state, self._flush)
        return loss if loss.requires_grad else loss.requires_grad_()

    def _look(self, parts: Sequence[Batch], totals: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Forwards only. What is on its way between two windows stays so."""
        sent, self.executor.links.sent = self.executor.links.sent, []
        losses = self.executor.run(parts, dict(totals))
        self.executor.links.sent = sent
        return self._loss(losses)

    def _window(self, parts: Sequence[Batch], totals: Mapping[str, torch.Tensor]) -> torch.Tensor:
        self._begin()
        first = (self.count % 2) * self.many
        self.step.parts = [*self.step.parts[:first], *parts, *self.step.parts[first + self.many :]]
        self.step.totals = dict(totals)
        loss = self._loss(self.losses, wait=False)
        left = len(self.before)
        if self.count and not left:
            self._complete()
        for place, action in enumerate(self.program.actions):
            earlier = place in self.before
            if not (earlier and not self.count):
                self._take(action, earlier)
            left -= earlier
            if earlier and self.count and not left:
                self._complete()
        self.losses, self.step.losses = self.step.losses, []
        self._end()
        self._let_go()
        self.versions.end_window()
        self.count += 1
        return self._arrived(loss)

    def _flush(self) -> torch.Tensor:
        self._begin()
        for place in sorted(self.before):
            self._take(self.program.actions[place], True)
        self._complete()
        self._let_go()
        self._let_go()
        loss = self._loss(self.losses, wait=False)
        self._end()
        self.losses, self.count = [], 0
        return self._arrived(loss)

    def _take(self, action: Action, earlier: bool) -> None:
        if action.kind in COMPUTE:
            self.executor.trace.append(str(action))
        half = (self.count - earlier) % 2 * self.many
        moved = Action(action.chunk, action.kind, action.micro_batch + half)
        if action.kind == "F":
            with self.versions.saving():
                self.step.take(moved)
        else:
            self.step.take(moved)

    # -- gradients

    def _begin(self) -> None:
        """What the last window has already computed of the batch before."""
        self.executor.trace = []
        self.reductions.begin()
        for parameter, gradient in self.partial.items():
            parameter.grad = gradient
        self.partial, self.finished = {}, {}

    def _complete(self) -> None:
        """The batch before is through: its sums over the data axis begin."""
        if self.program.mesh.dp.size > 1:
            for buckets in (self.state.buckets, *self.state.of_chunks):
                buckets.launch()
            return
        self.finished = {p: p.grad for p in self.parameters if p.grad is not None}
        for parameter in self.parameters:
            parameter.grad = None

    def _end(self) -> None:
        """Gradients of the batch before are with the parameters, those of this batch aside."""
        if self.program.mesh.dp.size > 1:
            for buckets in (self.state.buckets, *self.state.of_chunks):
                buckets.finish_begun()
        else:
            self.partial = {p: p.grad for p in self.parameters if p.grad is not None}
            for parameter in self.parameters:
                parameter.grad = self.finished.get(parameter)
        if self.count:
            self.reductions.tie()

    def _let_go(self) -> None:
        """Of what was sent in the window before: other stages have taken it, or will without this one's next window."""
        links = self.executor.links
        for each in self.sent:
            for work in each.works:
                work.wait()
        self.sent, links.sent = links.sent, []

    # -- losses

    def _loss(self, losses: Sequence[torch.Tensor], wait: bool = True) -> torch.Tensor:
        """The sum of all micro-batches, on its way from the last stage to all."""
        mesh = self.program.mesh
        dtype = getattr(torch, self.program.loss_dtype)
        loss = total(losses).to(dtype) if losses else torch.zeros((), dtype=dtype, device=mesh.device)
        self.work = None
        if mesh.pp.size > 1:
            source, group = mesh.global_rank(self.program.owners[-1]), mesh.group(mesh.pp.name)
            self.work = dist.broadcast(loss, source, group, async_op=True)
        return self._arrived(loss) if wait else loss

    def _arrived(self, loss: torch.Tensor) -> torch.Tensor:
        if self.work is not None:
            self.work.wait()
        return loss


def _of_the_batch_before(actions: Sequence[Action]) -> frozenset[int]:
    """Places of what stands before the forward of its micro-batch."""
    forwards = {(each.chunk, each.micro_batch): place for place, each in enumerate(actions) if each.kind == "F"}
    back = (*BACKWARD, "SEND_B", "RECV_B")
    return frozenset(
        place for place, each in enumerate(actions) if each.kind in back and place < forwards[each.chunk, each.micro_batch]
    )
