# ruff: noqa: F401
"""The namespace ``C`` of generated programs (``from autopar.runtime import collectives as C``): re-exports, nothing else.

A generated program calls torch directly where it can. What it takes from the runtime comes from here: placement conversions
(`comm.convert`), random masks (`device.rng`), and the operations whose sharded form is another algorithm (`ops`).
"""

from __future__ import annotations

from .comm.convert import PendingConversion, convert, convert_many, start, wait
from .device.rng import dropout, random
from .ops.attention.documents import attention_documents, document_numbers
from .ops.attention.documents import attention_documents as attention_documents_ring
from .ops.attention.dropout import attention_dropout
from .ops.attention.ring import attention_ring
from .ops.attention.sharded import attention, attention_heads, attention_rows
from .ops.control_flow import cond, opaque, while_loop
from .ops.experts import expert_capacity
from .ops.functions import (
    constant,
    count_valid,
    ctc_losses,
    embedding_sharded,
    histogram,
    linear_float8_dynamic,
    linear_kn,
    local_mean,
    rotary_embedding,
)
from .ops.losses import (
    cross_entropy_sharded,
    cross_entropy_sum,
    linear_cross_entropy_sharded,
    linear_cross_entropy_sum,
    logsumexp_sharded,
    token_log_probs,
    token_log_probs_sharded,
)
from .ops.mixtures import moe_experts, moe_experts_dispatched, moe_experts_owned, moe_experts_start, moe_experts_wait
from .ops.space.convolution import avg_pool_halo, convolution_halo, interpolate_halo, max_pool_halo, transposed_convolution_halo
from .ops.space.norms import adaptive_avg_pool_space, group_norm_space, instance_norm_space, mean_space
