"""Gradient reductions of a pipeline: over the data axis of each stage, and between stages that share (tied) parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, share_comm_ctx
from torch.distributed.tensor import DTensor

from ..compat.modules import clear_forward_order, finish_backward, reduce_gradients
from ..device.groups import shared_group
from ..state.fsdp import configure_backward, set_backward_prefetch, zero_stages
from ..state.gradient_buckets import GradientBuckets, accumulate_gradient
from ..state.model_state import State
from .stage_modules import ModelChunk, PipelineProgram


class GradientReductions:
    """Reduces the gradients of each model chunk over the data axis. With ZeRO-0 and ZeRO-1 the gradients of all micro-batches
    accumulate and are reduced after the chunk's last backward; with ZeRO-2 and ZeRO-3 those of each micro-batch are reduced."""

    def __init__(self, program: PipelineProgram, state: State, kind: type[ChunkReductions] | None = None) -> None:
        self.program, self.state = program, state
        pairs = zip(program.own_chunks, state.chunk_buckets, strict=False)
        self.chunks = {chunk.position: (kind or ChunkReductions)(chunk, buckets) for chunk, buckets in pairs}
        self.tied = _tied(program, state)
        # one stream of reductions: each chunk frees the buffer of the one before
        share_comm_ctx([each.chunk for each in self.chunks.values() if isinstance(each.chunk, FSDPModule)])

    def begin_step(self) -> None:
        """Prepare a step."""
        self.state.sync_copies()
        for buckets in (self.state.buckets, *self.state.chunk_buckets):
            buckets.accumulating = True
        for chunk in self.chunks.values():
            chunk.begin_step()

    def finish(self) -> None:
        """Wait for all reductions, and sum the gradients of tied parameters."""
        for chunk in self.chunks.values():
            chunk.reduce()
        for chunk in self.chunks.values():
            chunk.finish()
        for buckets in self.state.chunk_buckets[len(self.chunks) :]:
            buckets.finish()
        self.state.buckets.finish()
        self.reduce_tied()

    def reduce_tied(self) -> None:
        """Sum the gradients of parameters that several stages have."""
        training = [(parameter, group) for parameter, group in self.tied if parameter.requires_grad]
        works = [dist.all_reduce(_gradient(parameter), group=group, async_op=True) for parameter, group in training]
        for work in works:
            assert work is not None
            work.wait()


class ChunkReductions:
    """The FSDP2 modules of a model chunk, and its gradient buckets."""

    def __init__(self, chunk: ModelChunk, buckets: GradientBuckets) -> None:
        self.chunk, self.buckets = chunk, buckets
        self.zero = zero_stages(chunk)
        self.had_step = self.reduced = self.whole_beside_split = False
        self.mixed_precision = chunk.precision[0] != (chunk.reduce_dtype or chunk.precision[1])
        """FSDP2 does not reduce accumulated gradients together with those of this backward: they differ in dtype."""
        set_backward_prefetch(self.zero)
        if isinstance(chunk, FSDPModule):
            chunk.set_is_last_backward(False)  # its reductions run beside the backwards of other chunks, until `finish`

    def begin_step(self) -> None:
        self.reduced = False
        if isinstance(self.chunk, FSDPModule):
            clear_forward_order(self.chunk)

    def before_backward(self, kind: str, last: bool) -> None:
        """Prepare the backward of a micro-batch; `last`: the chunk's last."""
        self.buckets.accumulating = not last
        self.whole_beside_split = kind == "B" and self.mixed_precision and bool(self.chunk.weight_grads.pending)
        reduce_from = 4 if kind == "I" or self.whole_beside_split else 0 if last else 2
        configure_backward(self.zero, reduce_from, last)
        self.reduced = last

    def backward_weights(self, micro_batch: int, last: bool) -> None:
        """Run the second half of a split backward: the weight gradients."""
        # A parameter that several products use gets a gradient from each: the sums start in `reduce`.
        self.buckets.accumulating = True
        configure_backward(self.zero, 0 if last else 2, last)
        self.chunk.weight_grads.compute(micro_batch, self._block_done)
        self._reduce_all()
        self.reduced = last

    def after_backward(self) -> None:
        """Reduce the gradients of a whole backward that ran while weight gradients of split backwards were pending."""
        if self.whole_beside_split:
            configure_backward(self.zero, 2, False)
            self._reduce_all()

    def _reduce_all(self) -> None:
        for module in self.zero:
            reduce_gradients(module)
        if isinstance(self.chunk, FSDPModule):
            finish_backward(self.chunk)

    def _block_done(self, block: object) -> None:
        if isinstance(block, FSDPModule):
            reduce_gradients(block)

    def unshard(self) -> None:
        """Start the all-gather of the weights."""
        for module, stage in self.zero.items():
            if stage < 3 and self.had_step:
                module.unshard(async_op=True)

    def reshard(self) -> None:
        """Free gathered weights."""
        for module in self.zero:
            module.reshard()

    def reduce(self) -> None:
        """Start the reductions over the data axis that are left."""
        self.had_step = True
        if not self.reduced and isinstance(self.chunk, FSDPModule):
            configure_backward(self.zero, 0, True)
            self._reduce_all()
        self.reduced = True
        self.buckets.start_all()

    def finish(self) -> None:
        """Wait for the reductions."""
        if isinstance(self.chunk, FSDPModule):
            self.chunk.set_is_last_backward(True)
            finish_backward(self.chunk)
            self.chunk.set_is_last_backward(False)
        self.buckets.finish()


def _tied(program: PipelineProgram, state: State) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """This rank's parameters that other stages have too, with the process group of those stages. All ranks must call."""
    mesh, index = program.mesh, state.index
    shared = {n: stages for n, stages in index.holders.items() if len(stages) > 1 and not index.specs[n].buffer}
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for stages in sorted(set(shared.values())):
        for pipeline in mesh.pipeline_groups:
            members = [pipeline[stage] for stage in stages]
            group = shared_group("tied gradients", members)
            if dist.get_rank() in members:
                groups[stages] = group
    return [(state.parameters[name], groups[stages]) for name, stages in shared.items() if stages in groups]


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """The local gradient, zeros if the stage's part of the model did not use the parameter."""
    if parameter.grad is None:
        data = parameter.data
        assert isinstance(data, DTensor)
        accumulate_gradient(parameter, torch.zeros_like(data.to_local()))
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()
