"""Properties of the software that runs a training step: which communication overlaps with compute, which copies of weights and
gradients live through a step, and the update."""

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


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The defaults describe FSDP2 and autopar's own programs.

    stored_compute: weights in the compute dtype live through the step beside the master weights (Megatron, DeepSpeed; ZeRO, arXiv
        1910.02054, section 3.1); else they are cast for the forward and freed after the backward.
    fused_saves: fused kernels save their own inputs for the backward, a loss its logits (`compute.fused_saves`); else what
        autograd saves of every single operation.
    regathered_operands: a product saves the shard of an operand that it gathered over the tensor axis; its backward gathers it
        again under the product of the input gradient, in no time of its own (arXiv 2205.05198, section 4.2.2).
    contiguous_operands: attention saves a copy of an operand that is a view of a larger tensor, not that tensor.
    gradient_bytes: bytes of a gradient element, in memory and in its reduction; 0: as the master weight's.
    bfloat16_gradient_bytes: the same for runs in bfloat16, where these differ (DeepSpeed's optimizer for bfloat16 accumulates and
        reduces in float32, the one for float16 in float16); 0: they do not.
    master_remainders: in bfloat16, a master weight is stored as the 16 bits that the compute weight beside it lacks (apex
        DistributedFusedAdam: ``store_param_remainders``).
    accesses: reads and writes of master-sized tensors in the optimizer update; 0: torch's foreach implementation. (A fused Adam
        reads gradient, weight and two moments, writes three of them and the compute copy: 7.5.)
    update_copies: the update makes a temporary of the master's size for its shard (foreach; DeepSpeed's float32 gradients).
    owners_broadcast: each rank owns whole tensors and broadcasts them after the update (InternEvo), instead of one all-gather of
        equal shards.
    gathers_tensors: ZeRO-3 gathers and reduces each parameter by itself (DeepSpeed of 2021), instead of a whole group at once.
    float8_gathers: the operand of a product in float8 is cast before it is gathered over the tensor axis (torchao's
        ``PrepareFloat8ModuleInput``).
    """

    stored_compute: bool = False
    fused_saves: bool = False
    regathered_operands: bool = False
    contiguous_operands: bool = False
    gradient_bytes: int = 0
    bfloat16_gradient_bytes: int = 0
    master_remainders: bool = False
    accesses: float = 0.0
    update_copies: bool = True
    owners_broadcast: bool = False
    gathers_tensors: bool = False
    float8_gathers: bool = False
