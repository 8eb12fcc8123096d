"""How a pipeline's gradients come together: over the data axis of each stage, and between stages that share a parameter."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .compat import finish_backward, forget_order, reduce_now
from .gradients import Buckets, deliver
from .module import Block
from .pipeline import Chunk, Pipeline
from .state import State


class Reductions:
    """Over the data axis each chunk's gradients are summed behind its last backward, or as its state sharding says; ZeRO-1 adds
    up what the micro-batches make, ZeRO-2 and 3 reduce each of them."""

    def __init__(self, program: Pipeline, state: State) -> None:
        self.program, self.state = program, state
        pairs = zip(program.mine, state.of_chunks, strict=False)
        self.chunks = {chunk.position: _Chunk(chunk, buckets) for chunk, buckets in pairs}
        self.ties = _ties(program, state)

    def begin(self) -> None:
        """Before a step."""
        self.state.follow()
        self.state.buckets.hold = True
        for chunk in self.chunks.values():
            chunk.begin()

    def before(self, chunk: int, kind: str, last: bool) -> None:
        """Before the backward of a micro-batch; `last` of the chunk."""
        self.chunks[chunk].before(kind, last)

    def after(self, chunk: int) -> None:
        """Behind it."""
        self.chunks[chunk].after()

    def weights(self, chunk: int, micro_batch: int, last: bool) -> None:
        """The second half of a backward."""
        self.chunks[chunk].weights(micro_batch, last)

    def gather(self, chunk: int) -> None:
        """Begins to gather the weights."""
        self.chunks[chunk].gather()

    def drop(self, chunk: int) -> None:
        """Drops gathered weights."""
        self.chunks[chunk].drop()

    def reduce(self, chunk: int) -> None:
        """Begins what is left of the sums over the data axis."""
        self.chunks[chunk].reduce()

    def finish(self) -> None:
        """All gradients are there, and equal where parameters are."""
        for chunk in self.chunks.values():
            chunk.reduce()
        for chunk in self.chunks.values():
            chunk.buckets.finish()
        for outside in self.state.of_chunks[len(self.chunks) :]:
            outside.finish()
        self.state.buckets.finish()
        self.tie()

    def tie(self) -> None:
        """Sums the gradients of parameters that several stages have."""
        works = [dist.all_reduce(_gradient(parameter), group=group, async_op=True) for parameter, group in self.ties]
        for work in works:
            assert work is not None
            work.wait()


class _Chunk:
    """The sharded modules of a chunk and its buckets."""

    def __init__(self, chunk: Chunk, buckets: Buckets) -> None:
        self.chunk, self.buckets = chunk, buckets
        self.sharded = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
        zero = max((block.zero for _, block, _ in chunk.lent), default=2)
        self.zero = {module: module.zero if isinstance(module, Block) else min(2, zero) for module in self.sharded}
        self.warm = self.reduced = self.amid = False
        self.mixed = len(set(chunk.precision)) > 1
        """FSDP2 does not reduce sums of an earlier backward beside gradients of this one: they differ in dtype."""
        before: FSDPModule | None = None
        for module in self.sharded:  # else the order of forwards says, and micro-batches take turns
            keeps = self.zero[module] < 3 or before is None
            module.set_modules_to_backward_prefetch([module if keeps or before is None else before])
            before = module if isinstance(module, Block) else before

    def begin(self) -> None:
        self.reduced, self.buckets.hold = False, True
        if isinstance(self.chunk, FSDPModule):
            forget_order(self.chunk)

    def _set(self, reduce_from: int, last: bool) -> None:
        """What FSDP2 does behind a backward: reduces from a ZeRO stage on, and drops its weights."""
        for module in self.sharded:
            zero = self.zero[module]
            module.set_requires_gradient_sync(zero >= reduce_from, recurse=False)
            module.set_reshard_after_backward(last or zero == 3, recurse=False)
        if isinstance(self.chunk, FSDPModule):
            self.chunk.set_is_last_backward(last)

    def before(self, kind: str, last: bool) -> None:
        self.buckets.hold = not last
        self.amid = kind == "B" and self.mixed and bool(self.chunk.queue.waiting)
        self._set(4 if kind == "I" or self.amid else 0 if last else 2, last)
        self.reduced = last

    def weights(self, micro_batch: int, last: bool) -> None:
        self.buckets.hold = True  # a parameter that several products use gets a gradient from each: `reduce` begins the sums
        self._set(0 if last else 2, last)
        self.chunk.queue.drain(micro_batch, self._done)
        self._flush()
        self.reduced = last

    def after(self) -> None:
        """Reduces what a whole backward amid halves left."""
        if self.amid:
            self._set(2, False)
            self._flush()

    def _flush(self) -> None:
        for module in self.sharded:
            reduce_now(module)
        if isinstance(self.chunk, FSDPModule):
            finish_backward(self.chunk)

    def _done(self, block: object) -> None:
        if isinstance(block, FSDPModule):
            reduce_now(block)

    def gather(self) -> None:
        for module in self.sharded:
            if self.zero[module] < 3 and self.warm:
                module.unshard(async_op=True)

    def drop(self) -> None:
        for module in self.sharded:
            module.reshard()

    def reduce(self) -> None:
        self.warm = True
        if not self.reduced and isinstance(self.chunk, FSDPModule):
            self._set(0, True)
            self._flush()
        self.reduced = True
        self.buckets.launch()


def _ties(program: Pipeline, state: State) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """This rank's parameters that other stages have too, with the group of those ranks. All ranks must call."""
    mesh, spread = program.mesh, state.spread
    shared = {n: ranks for n, ranks in spread.holders.items() if len(ranks) > 1 and _trains(state, n)}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for ranks in sorted(set(shared.values())):
        for column in mesh.columns:
            group = dist.new_group([column[rank] for rank in ranks])
            if dist.get_rank() in [column[rank] for rank in ranks]:
                groups[ranks] = group
    return [(state.parameters[name], groups[ranks]) for name, ranks in shared.items() if ranks in groups]


def _trains(state: State, name: str) -> bool:
    spec = state.spread.specs[name]
    return spec.trainable and not spec.buffer


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The local gradient, zeros where the stage's part of the model did not reach it."""
    if parameter.grad is None:
        data = parameter.data
        assert isinstance(data, DTensor)
        deliver(parameter, torch.zeros_like(data.to_local()))
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()
