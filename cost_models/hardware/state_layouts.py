"""Optimizer state layout of a training framework: which copies of weights and gradients live through a step, and the update."""

from __future__ import annotations

from dataclasses import dataclass


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
