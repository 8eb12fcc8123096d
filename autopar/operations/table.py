"""The table of sharding rules, by operation: add a rule here.

Lines are in factor notation (see `notation`). Where the line depends on shapes or arguments, a function in `views`, `pointwise`
or `compute` writes it. A key without overload stands for all overloads.
"""

from __future__ import annotations

from functools import cache

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.ir.placement import Invariant
from autopar.operations import attention, compute, experts, opaque, pointwise, regions, space, views
from autopar.operations.images import IMAGES, mean_rule
from autopar.operations.notation.rule import Derive, DerivedLine, NamedFunction, Rule
from autopar.operations.transforms import DISTANCES, TRANSFORMS

WHOLE = """linspace logspace eye tril_indices triu_indices as_strided _pdist_forward masked_scatter affine_grid_generator
native_group_norm embedding_bag _embedding_bag"""
"""Operations that every rank computes whole: small ones, and those of which each result reads everything."""

LINES = {
    **DISTANCES,
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
    "ap.ctc_losses": "t! b c!, b u!, b, b -> b",
    "ap.expert_capacity": "... t! k! -> ... t! k!",
}

FUNCTIONS = {
    # each rank looks up its own rows, and has zeros for all others (Partial)
    "aten.embedding": NamedFunction("v", "ap.embedding_sharded"),
    # the loss is equal on all ranks of the axis, and each rank computes the gradient of its own logits: Invariant
    "ap.cross_entropy_sum": NamedFunction("v", "ap.cross_entropy_sharded", Invariant(), compute.cross_entropy_collectives),
}

SEVERAL = {
    **dict.fromkeys(attention.OPERATIONS, attention.FUNCTIONS),
    "ap.moe_experts": experts.FUNCTIONS,
    **space.FUNCTIONS,
}


def region_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Of operations with branches, by the rules of what is inside."""
    return regions.regions_line(node, shapes, _known())


@cache
def _known() -> dict[str, Rule]:
    return table()


DERIVED: dict[str, Derive] = {
    **IMAGES,
    **TRANSFORMS,
    "aten.argsort": pointwise.along_rule,
    "aten.scatter_reduce": pointwise.scatter_rule,
    "ap.linear_float8_dynamic": compute.float8_linear_rule,
    "aten.matmul": compute.matmul_rule,
    "aten.addmm": compute.addmm_rule,
    "aten.baddbmm": compute.addmm_rule,
    **dict.fromkeys(attention.OPERATIONS, attention.attention_rule),
    "ap.moe_experts": experts.moe_experts_rule,
    "ap.opaque": opaque.opaque_rule,
    "ap.cond": region_rule,
    "ap.while_loop": region_rule,
    "aten.conv1d": compute.convolution_rule,
    "aten.conv2d": compute.convolution_rule,
    "aten.conv3d": compute.convolution_rule,
    "aten.convolution": compute.convolution_rule,
    "aten.conv_transpose1d": compute.transposed_convolution_rule,
    "aten.conv_transpose2d": compute.transposed_convolution_rule,
    "aten.conv_transpose3d": compute.transposed_convolution_rule,
    "aten.layer_norm": compute.layer_norm_rule,
    "aten.native_layer_norm": compute.layer_norm_rule,
    "aten.rms_norm": compute.layer_norm_rule,
    "aten.group_norm": compute.group_norm_rule,
    "aten.adaptive_avg_pool1d": compute.leading_dims_rule_1d,
    "aten.max_pool2d_with_indices": compute.leading_dims_rule_2d,
    "aten.upsample_bicubic2d": compute.leading_dims_rule_2d,
    "aten.tril": compute.leading_dims_rule_2d,
    "aten.triu": compute.leading_dims_rule_2d,
    "aten.constant_pad_nd": compute.pad_rule,
    "aten.pad": compute.pad_rule,
    "aten.glu": compute.glu_rule,
    "aten.einsum": compute.einsum_rule,
    "aten.mse_loss": compute.pointwise_loss_rule(2),
    "aten.l1_loss": compute.pointwise_loss_rule(2),
    "aten.smooth_l1_loss": compute.pointwise_loss_rule(2),
    "aten.huber_loss": compute.pointwise_loss_rule(2),
    "aten.kl_div": compute.pointwise_loss_rule(2),
    "aten.binary_cross_entropy": compute.pointwise_loss_rule(3),
    "aten.binary_cross_entropy_with_logits": compute.pointwise_loss_rule(4),
    "aten.reshape": views.reshape_rule,
    "aten.permute": views.permute_rule,
    "aten.transpose": views.permute_rule,
    "aten.t": views.permute_rule,
    "aten.unsqueeze": views.squeeze_rule,
    "aten.squeeze": views.squeeze_rule,
    "aten.expand": views.expand_rule,
    "aten.slice": views.split_rule,
    "aten.split": views.split_rule,
    "aten.split_with_sizes": views.split_rule,
    "aten.chunk": views.split_rule,
    "aten.repeat": views.repeat_rule,
    "aten.repeat_interleave": views.repeat_interleave_rule,
    "aten.select": views.select_rule,
    "aten.unbind": views.select_rule,
    "aten.cat": views.concatenate_rule,
    "aten.stack": views.stack_rule,
    "aten.sum": pointwise.reduce_sum_rule,
    "aten.softmax": pointwise.along_rule,
    "aten._softmax": pointwise.along_rule,
    "aten.log_softmax": pointwise.along_rule,
    "aten._log_softmax": pointwise.along_rule,
    "aten.cumsum": pointwise.along_rule,
    "aten.cumprod": pointwise.along_rule,
    "aten.topk": pointwise.along_rule,
    "aten.sort": pointwise.along_rule,
    "aten.diff": pointwise.along_rule,
    "aten._weight_norm": pointwise.weight_norm_rule,
    "aten.flip": pointwise.flip_rule,
    "aten.roll": pointwise.roll_rule,
    "aten.gather": pointwise.gather_rule,
    "aten.slice_scatter": pointwise.slice_scatter_rule,
    "aten.select_scatter": pointwise.slice_scatter_rule,
    "aten.scatter": pointwise.scatter_rule,
    "aten.scatter_add": pointwise.scatter_add_rule,
    "aten.index_add": pointwise.index_add_rule,
    "aten.histc": pointwise.histogram_rule,
    "aten.index_select": pointwise.index_select_rule,
    "aten.index": pointwise.index_rule,
    "aten.arange": pointwise.unsharded_factory_rule,
    "aten.scalar_tensor": pointwise.unsharded_factory_rule,
    "ap.constant": pointwise.unsharded_factory_rule,
    **{f"aten.{name}": pointwise.unsharded_factory_rule for name in WHOLE.split()},
}

ELEMENTWISE = """
__and__ __or__ __xor__ _to_copy type_as
abs acos acosh add addcdiv addcmul alias asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor celu ceil
clamp clamp_max clamp_min clone copy copysign cos cosh detach div elu eq erf erfc exp exp2 expm1 floor floor_divide fmod ge gelu
gt hardsigmoid hardswish hardtanh isfinite isinf isnan le leaky_relu lerp log log10 log1p log2 log_sigmoid logical_and
logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul nan_to_num ne neg ones_like pow
reciprocal relu relu6 remainder round rsqrt rsub selu sigmoid sign silu sin sinh softplus sqrt square sub tan tanh to trunc
true_divide where xlogy zeros_like full_like empty_like
fill polar complex real imag angle _conj conj_physical sgn sinc hypot digamma lgamma erfinv i0 signbit nextafter
bitwise_left_shift bitwise_right_shift logaddexp logaddexp2 frac rad2deg deg2rad threshold positive _prelu_kernel
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
"""Sets of operands in which an operation is linear (see `Rule.linear_in`). A cast must not narrow (see `expand`)."""


def table() -> dict[str, Rule]:
    """All rules, by operation."""
    lines: dict[str, str | Derive] = {**LINES, **DERIVED}
    lines |= {f"aten.{name}": pointwise.elementwise_rule for name in ELEMENTWISE.split()}
    lines |= {
        "ap.dropout": pointwise.elementwise_rule,
        "ap.random": pointwise.elementwise_rule,
        "ap.local_mean": pointwise.local_mean_rule,
    }
    lines |= {f"aten.{name}": pointwise.reduce_whole_rule for name in WHOLE_REDUCTIONS.split()}
    lines["aten.mean"] = mean_rule
    lines |= {f"aten.{name}": pointwise.factory_rule for name in FACTORIES.split()}
    lines |= {op: lines[".".join(op.split(".")[:2])] for op in LINEAR}
    return {
        op: Rule(line, LINEAR.get(op, ()), (FUNCTIONS[op],) if op in FUNCTIONS else SEVERAL.get(op, ()))
        for op, line in lines.items()
    }
