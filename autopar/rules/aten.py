"""The table: every operation that has a sharding rule.

Lines are in factor notation (see `notation`); operations whose line depends on shapes or arguments have a function in `views`,
`pointwise` or `compute` that writes it. A key without overload stands for all overloads.
"""

from __future__ import annotations

from autopar.ir.placement import Invariant
from autopar.rules import attention, compute, experts, pointwise, views
from autopar.rules.rule import Derive, NamedFunction, Rule

LINES = {
    "aten.linear": "... k+, n k+, n -> ... n",
    "ap.linear_kn": "... k+, k+ n, n -> ... n",
    "aten.mm": "m k+, k+ n -> m n",
    "aten.bmm": "b m k+, b k+ n -> b m n",
    "aten.mv": "m k+, k+ -> m",
    "aten.dot": "k+, k+ -> ()",
    "aten.embedding": "v+ d, ... -> ... d",
    "ap.cross_entropy_sum": "...+ v+, ...+ -> ()",
    "ap.count_valid": "...+ -> ()",
    "aten.one_hot": "... -> ... c!",
    "ap.expert_capacity": "... t! k! -> ... t! k!",
}

FUNCTIONS = {
    # each rank looks up the rows that it has, zeros for others
    "aten.embedding": NamedFunction("v", "ap.embedding_sharded"),
    # the value is equal on all ranks of the axis, and each rank computes the gradient of its own logits: Invariant
    "ap.cross_entropy_sum": NamedFunction("v", "ap.cross_entropy_sharded", Invariant(), compute.cross_entropy_collectives),
}

SEVERAL = {**dict.fromkeys(attention.OPERATIONS, attention.FUNCTIONS), "ap.moe_experts": experts.FUNCTIONS}

DERIVED: dict[str, Derive] = {
    "aten.matmul": compute.matmul,
    "aten.addmm": compute.addmm,
    "aten.baddbmm": compute.addmm,
    **dict.fromkeys(attention.OPERATIONS, attention.attention),
    "ap.moe_experts": experts.moe_experts,
    "aten.conv1d": compute.convolution,
    "aten.conv2d": compute.convolution,
    "aten.conv3d": compute.convolution,
    "aten.convolution": compute.convolution,
    "aten.conv_transpose1d": compute.transposed_convolution,
    "aten.conv_transpose2d": compute.transposed_convolution,
    "aten.conv_transpose3d": compute.transposed_convolution,
    "aten.layer_norm": compute.layer_norm,
    "aten.native_layer_norm": compute.layer_norm,
    "aten.rms_norm": compute.layer_norm,
    "aten.group_norm": compute.group_norm,
    "aten.max_pool1d": compute.last_whole,
    "aten.avg_pool1d": compute.last_whole,
    "aten.adaptive_avg_pool1d": compute.last_whole,
    "aten.max_pool2d": compute.last_two_whole,
    "aten.max_pool2d_with_indices": compute.last_two_whole,
    "aten.avg_pool2d": compute.last_two_whole,
    "aten.adaptive_avg_pool2d": compute.last_two_whole,
    "aten._adaptive_avg_pool2d": compute.last_two_whole,
    "aten.upsample_nearest2d": compute.last_two_whole,
    "aten.upsample_bilinear2d": compute.last_two_whole,
    "aten.upsample_bicubic2d": compute.last_two_whole,
    "aten.tril": compute.last_two_whole,
    "aten.triu": compute.last_two_whole,
    "aten.constant_pad_nd": compute.pad,
    "aten.pad": compute.pad,
    "aten.glu": compute.glu,
    "aten.einsum": compute.einsum,
    "aten.mse_loss": compute.pointwise_loss(2),
    "aten.l1_loss": compute.pointwise_loss(2),
    "aten.smooth_l1_loss": compute.pointwise_loss(2),
    "aten.huber_loss": compute.pointwise_loss(2),
    "aten.kl_div": compute.pointwise_loss(2),
    "aten.binary_cross_entropy": compute.pointwise_loss(3),
    "aten.binary_cross_entropy_with_logits": compute.pointwise_loss(4),
    "aten.reshape": views.reshape,
    "aten.permute": views.permute,
    "aten.transpose": views.permute,
    "aten.t": views.permute,
    "aten.unsqueeze": views.squeeze,
    "aten.squeeze": views.squeeze,
    "aten.expand": views.expand,
    "aten.slice": views.cut,
    "aten.split": views.cut,
    "aten.split_with_sizes": views.cut,
    "aten.chunk": views.cut,
    "aten.repeat": views.repeat,
    "aten.repeat_interleave": views.repeat_interleave,
    "aten.select": views.select,
    "aten.unbind": views.select,
    "aten.cat": views.concatenate,
    "aten.stack": views.stack,
    "aten.sum": pointwise.reduce_sum,
    "aten.softmax": pointwise.along,
    "aten._softmax": pointwise.along,
    "aten.log_softmax": pointwise.along,
    "aten._log_softmax": pointwise.along,
    "aten.cumsum": pointwise.along,
    "aten.cumprod": pointwise.along,
    "aten.topk": pointwise.along,
    "aten.sort": pointwise.along,
    "aten.diff": pointwise.along,
    "aten._weight_norm": pointwise.weight_norm,
    "aten.flip": pointwise.flip,
    "aten.roll": pointwise.roll,
    "aten.gather": pointwise.gather,
    "aten.slice_scatter": pointwise.slice_scatter,
    "aten.select_scatter": pointwise.slice_scatter,
    "aten.scatter": pointwise.scatter,
    "aten.scatter_add": pointwise.scatter_add,
    "aten.index_add": pointwise.index_add,
    "aten.histc": pointwise.histogram,
    "aten.index_select": pointwise.index_select,
    "aten.index": pointwise.index,
    "aten.arange": pointwise.whole_factory,
    "aten.scalar_tensor": pointwise.whole_factory,
}

ELEMENTWISE = """
__and__ __or__ __xor__ _to_copy type_as
abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor celu ceil
clamp clamp_max clamp_min clone copy copysign cos cosh detach div elu eq erf erfc exp exp2 expm1 floor floor_divide fmod ge gelu
gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg ones_like pow
reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh softplus sqrt square sub tan tanh to trunc
true_divide where xlogy zeros_like full_like empty_like
"""

WHOLE_REDUCTIONS = "mean amax amin max min var std prod argmax argmin any all logsumexp linalg_vector_norm"

FACTORIES = "zeros ones full empty new_zeros new_ones new_full new_empty"

LINEAR: dict[str, tuple[tuple[int, ...] | str, ...]] = {
    **dict.fromkeys(("aten.add.Tensor", "aten.sub.Tensor", "aten.cat", "aten.stack"), ("all",)),
    **dict.fromkeys(("aten.mul.Tensor",), ((0,), (1,))),
    **dict.fromkeys(("aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar", "aten.neg", "aten.clone", "aten.alias"), ((0,),)),
    **dict.fromkeys(
        ("aten.reshape", "aten.permute", "aten.transpose", "aten.t", "aten.unsqueeze", "aten.squeeze", "aten.expand"), ((0,),)
    ),
    **dict.fromkeys(("aten.slice", "aten.split", "aten.split_with_sizes", "aten.chunk", "aten.select", "aten.unbind"), ((0,),)),
    **dict.fromkeys(("aten.sum", "aten.mean.dim", "aten.to.dtype"), ((0,),)),
}
"""Where a Partial may be handed on: operands that are Partial together. A cast must not narrow (see `expand`)."""


def table() -> dict[str, Rule]:
    """Every rule by operation."""
    lines: dict[str, str | Derive] = {**LINES, **DERIVED}
    lines |= {f"aten.{name}": pointwise.elementwise for name in ELEMENTWISE.split()}
    lines |= {"ap.dropout": pointwise.elementwise, "ap.random": pointwise.elementwise, "ap.local_mean": pointwise.local_mean}
    lines |= {f"aten.{name}": pointwise.reduce_whole for name in WHOLE_REDUCTIONS.split()}
    lines |= {f"aten.{name}": pointwise.factory for name in FACTORIES.split()}
    lines |= {op: lines[".".join(op.split(".")[:2])] for op in LINEAR}
    return {
        op: Rule(line, LINEAR.get(op, ()), (FUNCTIONS[op],) if op in FUNCTIONS else SEVERAL.get(op, ()))
        for op, line in lines.items()
    }
