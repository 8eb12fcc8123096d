"""The communication that a training step overlaps with compute: a property of the software that runs the step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """The communication that overlaps with compute. The defaults describe autopar's own programs.

    contention: share of its speed that compute loses while communication overlaps it (collectives take multiprocessors and memory
        bandwidth).
    gradient_reduction: gradients are reduced while the backward of earlier blocks runs (Megatron: ``overlap_grad_reduce``); else
        after the last backward.
    parameter_gather: weights of the next block are gathered while this one computes (FSDP2's prefetch, Megatron's
        ``overlap_param_gather``); else when they are needed.
    blocking_sends: a pipeline stage stalls until a p2p send has completed.
    scattered_sends: each rank of a tensor axis sends its shard of an activation that all of them hold (scatter/gather
        optimization, arXiv 2104.04473, section 4.1).
    model_parallel: collectives of model axes, and of attention over shards of a sequence, are decomposed and overlap with the
        products beside them (Megatron: ``tp_comm_overlap``).
    expert_dispatch: all-to-alls of experts overlap with compute too.
    weight_gradients: the collective that completes the gradient of products' operand runs beside the gradients of their weights
        (Megatron: asynchronous all-reduce of column-parallel linears). Compiled programs of autopar do so, whatever
        a description says: `with_compilation` sets it.
    async_tensor_parallel: all-gathers of model axes within a node run in pieces with the products that read them, and products
        with the reduce-scatters of their results (torch's asynchronous tensor parallelism). Compiled programs of autopar do so on
        devices with symmetric memory, whatever a description says: `with_compilation` sets it.
    async_tp_by_messages: they do so over other switches too (NVLink of older devices, a network between hosts), where ranks send
        their shards to one another. No description has it unless a user asks for it: measured over gloo alone, it did not pay.
    gradient_buffers: gradients have buffers of their own and queue for their reduction, so that no backward waits for one.
    """

    contention: float = 0.0
    gradient_reduction: bool = True
    parameter_gather: bool = True
    blocking_sends: bool = False
    scattered_sends: bool = False
    model_parallel: bool = False
    expert_dispatch: bool = False
    weight_gradients: bool = False
    async_tensor_parallel: bool = False
    async_tp_by_messages: bool = False
    gradient_buffers: bool = False
