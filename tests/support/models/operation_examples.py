"""At least one example of every operation that has a rule, for proofs by execution: `CASES` maps an operation to examples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autopar.ir.graph import Arg, Block, DType, Node, Ref, Value
from support.oracles.simulate_ranks import run_node


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument: random normal (or uniform in `within`), or integers below `high`, or booleans."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    high: int = 0
    within: tuple[float, float] | None = None
    constant: bool = False
    """Whether it has no gradient, as an operation asks for."""

    def make(self) -> torch.Tensor:
        if self.dtype == "bool":
            return torch.rand(self.shape) < 0.7
        if "int" in self.dtype:
            return torch.randint(0 if self.within is None else 1, self.high, self.shape, dtype=getattr(torch, self.dtype))
        x = torch.randn(self.shape, dtype=getattr(torch, self.dtype))
        return x.uniform_(*self.within) if self.within else x


def t(*shape: int) -> TensorSpec:
    return TensorSpec(shape)


def p(*shape: int) -> TensorSpec:
    return TensorSpec(shape, within=(0.5, 3.0))


def u(*shape: int) -> TensorSpec:
    return TensorSpec(shape, within=(0.1, 0.9))


def c(*shape: int) -> TensorSpec:
    return TensorSpec(shape, within=(0.5, 3.0), constant=True)


def i(high: int, *shape: int) -> TensorSpec:
    return TensorSpec(shape, "int64", high)


def m(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bool")


def build(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Block, dict[str, torch.Tensor]]:
    """A block of one node, and values for its inputs."""
    tensors: dict[str, torch.Tensor] = {}
    leaves: dict[str, torch.Tensor] = {}

    def place(arg: Any) -> Arg:
        if isinstance(arg, TensorSpec):
            name = f"x{len(tensors)}"
            tensors[name] = x = arg.make()
            leaves[name] = x.clone().requires_grad_(x.is_floating_point() and not arg.constant)
            return Ref(name)
        return tuple(map(place, arg)) if isinstance(arg, tuple) else arg

    placed, named = tuple(map(place, args)), tuple((name, place(arg)) for name, arg in kwargs.items())
    results = run_node(Node(op, placed, named, ()), leaves, 8)

    def value(name: str, x: torch.Tensor) -> Value:
        return Value(name, tuple(x.shape), str(x.dtype).removeprefix("torch."), x.requires_grad)

    outputs = tuple(value(f"y{index}", x) for index, x in enumerate(results))
    inputs = tuple(value(name, x) for name, x in leaves.items())
    node = Node(op, placed, named, outputs)
    return Block("Case", inputs, (), (node,), tuple(item.name for item in outputs)), tensors


def constants(block: Block) -> frozenset[str]:
    """The inputs that have no gradient."""
    return frozenset(value.name for value in block.inputs if not value.differentiable)


UNARY = """abs asinh atan ceil clone cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish hardtanh
isfinite isinf isnan leaky_relu log_sigmoid mish nan_to_num ne.Scalar neg celu alias detach trunc
ones_like zeros_like relu relu6 round selu sigmoid sign silu sin sinh softplus square tan tanh logical_not"""
POSITIVE_UNARY = "acosh log log10 log1p log2 reciprocal rsqrt sqrt"
UNIT_UNARY = "acos asin atanh logit"
BINARY = """add.Tensor sub.Tensor mul.Tensor div.Tensor true_divide.Tensor atan2 copysign.Tensor eq.Tensor ge.Tensor gt.Tensor
le.Tensor lt.Tensor ne.Tensor maximum minimum fmod.Tensor remainder.Tensor logical_and logical_or logical_xor
rsub.Tensor hypot div.Tensor_mode max.other min.other xlogy.Tensor pow.Tensor_Tensor"""


def single_operations() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(op, arguments, keyword arguments)."""
    for op in UNARY.split():
        args: tuple[Any, ...] = (t(8, 4), 0.5) if op.endswith(".Scalar") else (t(8, 4),)
        yield f"aten.{op}", args, {}
    for op in POSITIVE_UNARY.split():
        yield f"aten.{op}", (TensorSpec((8, 4), within=(1.1, 3.0)),), {}
    for op in UNIT_UNARY.split():
        yield f"aten.{op}", (TensorSpec((8, 4), within=(0.1, 0.9)),), {}
    for op in BINARY.split():
        kwargs = {"rounding_mode": "floor"} if op == "div.Tensor_mode" else {}
        yield f"aten.{op}", (p(4, 8), p(4, 8)), kwargs
        yield f"aten.{op}", (p(4, 1, 8), p(4, 1)), kwargs
        yield f"aten.{op}", (p(8), p()), kwargs
    for op in ("bitwise_and.Tensor", "bitwise_or.Tensor", "bitwise_xor.Tensor"):
        yield f"aten.{op}", (m(4, 8), m(8)), {}
    for op in ("__and__.Tensor", "__or__.Tensor", "__xor__.Tensor"):
        yield f"aten.{op}", (m(4, 8), m(8)), {}
    yield "aten.bitwise_not", (m(4, 8),), {}
    yield from _scalars()
    yield from _products()
    yield from _norms_and_pools()
    yield from _views()
    yield from _reductions()
    yield from _indexing()


def _scalars() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    yield "aten.add.Tensor", (t(4, 8), 2.0), {}
    yield "aten.add.Tensor", (t(4, 8), t(4, 8)), {"alpha": 2}
    yield "aten.sub.Tensor", (t(4, 8), 2.0), {}
    yield "aten.mul.Tensor", (t(4, 8), 2.0), {}
    yield "aten.mul.Scalar", (t(4, 8), 2.0), {}
    yield "aten.div.Scalar", (t(4, 8), 2.0), {}
    yield "aten.div.Tensor", (t(4, 8), 2.0), {}
    yield "aten.pow.Tensor_Scalar", (t(4, 8), 2), {}
    yield "aten.pow.Scalar", (2.0, t(4, 8)), {}
    yield "aten.addcmul", (t(4, 8), t(8), t(4, 1)), {}
    yield "aten.addcdiv", (t(4, 8), t(8), p(4, 1)), {}
    yield "aten.lerp.Scalar", (t(4, 8), t(4, 8), 0.3), {}
    yield "aten.clamp", (t(4, 8), -1.0, 1.0), {}
    yield "aten.clamp_min", (t(4, 8), 0.0), {}
    yield "aten.clamp_max", (t(4, 8), 0.0), {}
    yield "aten.copy", (i(9, 4, 8), i(9, 8)), {}
    yield "aten.floor_divide", (i(9, 4, 8), TensorSpec((8,), "int64", 5, (1, 5))), {}
    yield "aten.full_like", (t(4, 8), 2.0), {}
    yield "aten.masked_fill.Scalar", (t(4, 8), m(8), 0.5), {}
    yield "aten.masked_fill.Scalar", (t(4, 1, 8), m(8, 8), -9.0), {}
    yield "aten.masked_fill.Tensor", (t(4, 8), m(4, 8), t()), {}
    yield "aten.where.self", (m(4, 8), t(4, 8), t(8)), {}
    yield "aten.where.self", (m(4, 8), t(4, 8), t()), {}
    yield "aten.to.dtype", (TensorSpec((4, 8), "float32"), DType("float64")), {}
    yield "aten.to.dtype", (m(4, 8), DType("float64")), {}
    yield "aten.to.dtype", (t(4, 8), DType("float64")), {}
    yield "aten._to_copy", (TensorSpec((4, 8), "float32"),), {"dtype": DType("float64")}
    yield "aten.type_as", (TensorSpec((4, 8), "float32"), t(4, 8)), {}
    yield "ap.dropout", (t(4, 8), 0.3), {}
    yield "ap.local_mean", (t(4, 8, 2, 2), (0, 2, 3), 0), {}
    yield "ap.random", (t(4, 8), "uniform", 0.0, 1.0), {}
    yield "ap.rotary_embedding", (t(4, 2, 8, 6), t(1, 1, 8, 6), t(1, 1, 8, 6)), {}
    yield "ap.rotary_embedding", (t(4, 8, 6), t(8, 3), t(8, 3)), {}
    yield "ap.rotary_embedding", (t(4, 8, 6), t(8, 6), t(8, 6), "interleaved"), {}
    yield "ap.rotary_embedding", (t(4, 8, 6), t(8, 3), t(8, 3), "interleaved to halves"), {}
    yield "ap.rotary_embedding", (t(4, 2, 8, 6), t(4, 1, 8, 6), t(4, 1, 8, 6)), {}
    yield "aten.glu", (t(4, 16), -1), {}
    yield "aten.glu", (t(8, 4), 0), {}


def _products() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    yield "aten.linear", (t(4, 8, 12), t(24, 12)), {}
    yield "aten.linear", (t(8, 12), t(24, 12), t(24)), {}
    yield "aten.linear", (t(12), t(24, 12), t(24)), {}
    yield "aten.linear", (t(8, 12), t(24, 12), None), {}
    yield "ap.linear_kn", (t(4, 8, 12), t(12, 24), t(24)), {}
    yield "ap.linear_kn", (t(8, 12), t(12, 24)), {}
    yield "ap.linear_float8_dynamic", (t(4, 8, 64), t(128, 64), t(128)), {}
    yield "ap.linear_float8_dynamic", (t(8, 64), t(128, 64)), {}
    yield "aten.mm", (t(8, 12), t(12, 24)), {}
    yield "aten.addmm", (t(24), t(8, 12), t(12, 24)), {}
    yield "aten.addmm", (t(8, 24), t(8, 12), t(12, 24)), {"alpha": 2, "beta": 3}
    yield "aten.addmm", (t(1, 24), t(8, 12), t(12, 24)), {}
    yield "aten.bmm", (t(4, 8, 12), t(4, 12, 8)), {}
    yield "aten.baddbmm", (t(4, 8, 8), t(4, 8, 12), t(4, 12, 8)), {}
    yield "aten.baddbmm", (t(1, 8), t(4, 8, 12), t(4, 12, 8)), {}
    yield "aten.mv", (t(8, 12), t(12)), {}
    yield "aten.dot", (t(12), t(12)), {}
    yield "aten.vdot", (t(12), t(12)), {}
    for a, b in (((12,), (12,)), ((12,), (12, 8)), ((8, 12), (12,)), ((4, 8, 12), (12, 8)), ((4, 2, 8, 12), (2, 12, 8))):
        yield "aten.matmul", (t(*a), t(*b)), {}
    yield "aten.matmul", (t(4, 1, 8, 12), t(1, 4, 12, 8)), {}
    yield "aten.einsum", ("bij,bjk->bik", (t(4, 8, 12), t(4, 12, 8))), {}
    yield "aten.einsum", ("ij,kl->il", (t(4, 8), t(8, 4))), {}
    yield "aten.einsum", ("i,ij,i->j", (t(8), t(8, 4), t(8))), {}
    yield "aten.einsum", ("bij,bjk->bik", (t(4, 8, 12), t(1, 12, 8))), {}
    yield "aten.einsum", ("bsd,bsd->bs", (t(4, 8, 12), t(4, 8, 1))), {}  # what is repeated is a factor, not an addend
    for op, more in (
        ("mse_loss", ()),
        ("l1_loss", ()),
        ("smooth_l1_loss", ()),
        ("huber_loss", ()),
        ("binary_cross_entropy", (None,)),
    ):
        for reduction in (0, 1, 2):
            yield f"aten.{op}", (u(4, 8), u(4, 8), *more, reduction), {}
    yield "aten.kl_div", (t(4, 8), u(4, 8), 2), {}
    yield "aten.binary_cross_entropy_with_logits", (t(4, 8), u(4, 8), None, None, 2), {}
    for weights in ((None, c(8)), (c(8), c(4, 1)), (c(4, 8), None)):
        yield "aten.binary_cross_entropy_with_logits", (t(4, 8), u(4, 8), *weights, 2), {}
    yield "aten.binary_cross_entropy", (u(4, 8), u(4, 8), c(4, 1), 2), {}
    q, k = (4, 8, 6, 4), (4, 8, 10, 4)
    yield "aten.scaled_dot_product_attention", (t(*q), t(*k), t(*k)), {}
    yield "aten.scaled_dot_product_attention", (t(4, 8, 4), t(4, 12, 4), t(4, 12, 8)), {}
    yield "aten.scaled_dot_product_attention", (t(4, 8, 8, 4), t(4, 8, 8, 4), t(4, 8, 8, 4), None, 0.0, True), {"scale": 0.3}
    for mask in ((4, 8, 8, 8), (4, 1, 8, 8), (1, 1, 8, 8), (8, 8), (4, 1, 1, 8)):
        yield "aten.scaled_dot_product_attention", (t(4, 8, 8, 4), t(4, 8, 8, 4), t(4, 8, 8, 4), t(*mask)), {}
        yield "aten.scaled_dot_product_attention", (t(4, 8, 8, 4), t(4, 4, 8, 4), t(4, 4, 8, 4), t(*mask)), {"enable_gqa": True}
    grouped = (t(2, 16, 8, 4), t(2, 4, 8, 4), t(2, 4, 8, 4), None, 0.0, True)
    yield "aten.scaled_dot_product_attention", grouped, {"scale": 0.5, "enable_gqa": True}
    yield "aten.scaled_dot_product_attention", (t(2, 4, 8, 4), t(2, 2, 8, 4), t(2, 2, 8, 4)), {"enable_gqa": True}
    band = (t(2, 8, 8, 4), t(2, 4, 8, 4), t(2, 4, 8, 4))
    yield "ap.attention", (*band, None, 0.0, False), {"enable_gqa": True, "window": (3, 0)}
    yield "ap.attention", (*band, m(2, 1, 1, 8), 0.0, True), {"enable_gqa": True, "window": (-1, 0)}
    yield "ap.attention", (t(2, 8, 8, 4), t(2, 8, 12, 4), t(2, 8, 12, 4), t(1, 8, 8, 12)), {"window": (2, 5)}
    packed = (t(2, 8, 8, 4), t(2, 4, 8, 4), t(2, 4, 8, 8))
    yield "ap.attention_documents", (*packed, i(3, 2, 8), i(3, 2, 8), i(8, 2, 8), i(8, 2, 8)), {"enable_gqa": True}
    yield "ap.attention_documents", (*packed[:1] * 3, i(2, 2, 8), i(2, 2, 8), i(8, 2, 8), i(8, 2, 8)), {"window": (3, 0)}
    yield "ap.attention_documents", (*packed[:1], *packed[:1] * 2, i(2, 1, 8), i(2, 1, 8)), {"scale": 0.3}
    yield from _experts()
    yield "aten.embedding", (t(16, 8), i(16, 4, 8)), {}
    yield "aten.embedding", (t(16, 8), i(16, 4), 3), {}
    yield "ap.cross_entropy_sum", (t(4, 8, 16), i(16, 4, 8), -100, 0.0), {}
    yield "ap.cross_entropy_sum", (t(8, 16), i(16, 8), 3, 0.1), {}
    yield "ap.token_log_probs", (t(4, 8, 16), i(16, 4, 8, 1)), {}
    yield "ap.count_valid", (i(4, 4, 8), 2), {}
    for dims, form in ((1, ""), (2, ".input"), (3, ".input")):
        image, kernel = (4, 8, *(6,) * dims), (12, 8, *(3,) * dims)
        yield f"aten.conv{dims}d", (t(*image), t(*kernel), t(12)), {}
        yield f"aten.conv{dims}d", (t(*image), t(8, 1, *(3,) * dims), t(8), (1,) * dims, (1,) * dims, (1,) * dims, 8), {}
        yield f"aten.conv{dims}d", (t(*image), t(16, 2, *(3,) * dims), None, (1,) * dims, (0,) * dims, (1,) * dims, 4), {}
        yield f"aten.conv_transpose{dims}d{form}", (t(*image), t(8, 12, *(3,) * dims)), {}
    yield "aten.conv_transpose2d.input", (t(4, 8, 6, 6), t(8, 3, 2, 2), t(12), (2, 2), (0, 0), (0, 0), 4), {}
    yield "aten.conv2d.padding", (t(4, 8, 6, 6), t(8, 1, 3, 3), None, (1, 1), "same", (1, 1), 8), {}
    yield "aten.conv2d", (t(8, 6, 6), t(16, 1, 3, 3)), {"groups": 8}
    yield "aten.convolution", (t(4, 8, 6), t(16, 2, 3), t(16), (1,), (1,), (1,), False, (0,), 4), {}
    yield "aten.convolution", (t(4, 8, 6), t(8, 3, 3), t(12), (1,), (1,), (1,), True, (0,), 4), {}
    yield "aten.conv2d", (t(8, 6, 6), t(12, 8, 3, 3)), {}
    yield "aten.conv2d", (t(4, 8, 6, 6), t(12, 8, 2, 2), None, (2, 2)), {}
    yield "aten.convolution", (t(4, 8, 6), t(12, 8, 3), t(12), (1,), (1,), (1,), False, (0,), 1), {}


def _experts() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    routed = (t(4, 8, 6), i(5, 4, 8, 2), t(4, 8, 2))  # 4 is nowhere
    yield "ap.moe_experts", (*routed, t(4, 16, 6), t(4, 6, 8), None, None, "silu", "halves", None), {}
    biased = (t(4, 16, 6), t(4, 6, 8), t(4, 16), t(4, 6))
    yield "ap.moe_experts", (*routed, *biased, "gelu", "interleaved", None), {}
    transposed = (t(4, 6, 8), t(4, 8, 6), t(4, 8), t(4, 6))
    yield "ap.moe_experts", (t(8, 6), i(5, 8, 2), t(8, 2), *transposed, "relu2", "plain transposed", None), {}
    yield "ap.expert_capacity", (i(5, 4, 8, 2), 4, 0.5), {}
    yield "ap.ctc_losses", (t(9, 4, 6), i(5, 4, 3), TensorSpec((4,), "int64", 10, (1, 10)), i(4, 4), 5, True), {}
    yield "ap.expert_capacity", (i(5, 2, 4, 8, 2), 4, 1.25), {}


def _norms_and_pools() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    yield "aten.layer_norm", (t(4, 8, 12), (12,), t(12), t(12), 1e-5), {}
    yield "aten.layer_norm", (t(4, 8, 12), (8, 12)), {}
    yield "aten.native_layer_norm", (t(4, 8, 12), (12,), t(12), t(12), 1e-5), {}
    yield "aten.rms_norm", (t(4, 8, 12), (12,), t(12), 1e-5), {}
    yield "aten.group_norm", (t(4, 8, 6), 2, t(8), t(8)), {}
    yield "aten.group_norm", (t(4, 8, 6, 6), 4), {}
    for op in ("softmax.int", "log_softmax.int"):
        yield f"aten.{op}", (t(4, 8, 12), -1), {}
    for op in ("_softmax", "_log_softmax"):
        yield f"aten.{op}", (t(4, 8, 12), 1, False), {}
    yield "aten.max_pool1d", (t(4, 8, 12), (2,)), {}
    yield "aten.avg_pool1d", (t(4, 8, 12), (2,)), {}
    yield "aten.adaptive_avg_pool1d", (t(4, 8, 12), (3,)), {}
    yield "aten.max_pool2d", (t(4, 8, 12, 6), (2, 2)), {}
    yield "aten.max_pool2d_with_indices", (t(4, 8, 12, 6), (2, 2)), {}
    yield "aten.avg_pool2d", (t(8, 12, 6), (2, 2)), {}
    yield "aten.adaptive_avg_pool2d", (t(4, 8, 12, 6), (1, 1)), {}
    yield "aten._adaptive_avg_pool2d", (t(4, 8, 12, 6), (1, 1)), {}
    yield "aten.upsample_nearest2d", (t(4, 8, 4, 4), (8, 8)), {}
    yield "aten.upsample_bilinear2d", (t(4, 8, 4, 4), (8, 8), False), {}
    yield "aten.upsample_bicubic2d", (t(4, 8, 4, 4), (8, 8), False), {}
    yield "aten.tril", (t(4, 8, 8),), {}
    yield "aten.triu", (t(4, 8, 8), 1), {}
    yield "aten.constant_pad_nd", (t(4, 8, 8), (1, 1), 0.0), {}
    yield "aten.pad", (t(4, 8, 8, 8), (1, 1, 2, 0)), {}
    yield "aten.pad", (t(4, 8, 8, 8), (0, 0, 1, 1, 0, 0)), {}
    yield "aten._weight_norm", (t(4, 8, 6), t(1, 1, 6), 2), {}
    yield "aten._weight_norm", (t(8, 4, 6), p(8, 1, 1)), {}
    yield "aten.flip", (t(4, 8, 8), (1,)), {}
    yield "aten.roll", (t(4, 8, 8), (1, 2), (1, 2)), {}
    yield "aten.roll", (t(4, 8), (1,)), {}


def _views() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for source, target in (
        ((4, 8, 24), (4, 8, 6, 4)), ((4, 8, 6, 4), (4, 8, 24)), ((4, 8, 24), (32, 24)), ((6, 4), (4, 6)), ((4, 3, 8), (4, 24)),
        ((24, 8), (6, 32)), ((4, 1, 8), (1, 4, 8, 1)), ((8, 6, 4), (8, 4, 6)), ((3, 4, 8), (96,)), ((4, 36), (4, 3, 4, 3)),
    ):  # fmt: skip
        yield "aten.reshape", (t(*source), target), {}
    yield "aten.permute", (t(4, 8, 12), (2, 0, 1)), {}
    yield "aten.transpose.int", (t(4, 8, 12), 1, -1), {}
    yield "aten.t", (t(4, 8),), {}
    yield "aten.unsqueeze", (t(4, 8), -1), {}
    yield "aten.unsqueeze", (t(4, 8), 1), {}
    yield "aten.squeeze.dim", (t(4, 1, 8), 1), {}
    yield "aten.squeeze.dims", (t(4, 1, 8, 1), (1, 3)), {}
    yield "aten.expand", (t(4, 1, 8), (4, 4, 8)), {}
    yield "aten.expand", (t(8), (4, 4, 8)), {}
    yield "aten.slice.Tensor", (t(4, 24), 1, 8, 16), {}
    yield "aten.slice.Tensor", (t(4, 24), 1, 16, 2**63 - 1), {}
    yield "aten.slice.Tensor", (t(4, 24), 1, 1, 9), {}
    yield "aten.slice.Tensor", (t(4, 24), 1, 0, 24, 2), {}
    yield "aten.slice.Tensor", (t(4, 24), 0, 0, 2**63 - 1), {}
    yield "aten.slice.Tensor", (t(24, 4),), {}
    yield "aten.split.Tensor", (t(4, 24), 8, 1), {}
    yield "aten.split.Tensor", (t(4, 20), 8, -1), {}
    yield "aten.split.Tensor", (t(24, 4), 12), {}
    yield "aten.split_with_sizes", (t(4, 24), (8, 8, 8), 1), {}
    yield "aten.split_with_sizes", (t(4, 24), (4, 8, 12), 1), {}
    yield "aten.chunk", (t(4, 24), 3, 1), {}
    yield "aten.repeat", (t(4, 8), (1, 3)), {}
    yield "aten.repeat", (t(4, 1), (2, 2, 4)), {}
    yield "aten.repeat_interleave.self_int", (t(4, 8, 6), 3, 1), {"output_size": 24}
    yield "aten.repeat_interleave.self_int", (t(4, 8), 3, 1), {}
    yield "aten.select.int", (t(4, 3, 8), 1, 2), {}
    yield "aten.unbind.int", (t(3, 4, 8),), {}
    yield "aten.cat", ((t(4, 8), t(4, 8), t(4, 8)), 1), {}
    yield "aten.cat", ((t(4, 8), t(4, 12)), -1), {}
    yield "aten.cat", ((t(1, 8), t(4, 8)),), {}
    yield "aten.stack", ((t(4, 8), t(4, 8)), 1), {}
    yield "aten.stack", ((t(4, 8), t(4, 8)),), {}
    yield "aten.stack", ((t(4, 8), t(4, 8)), -1), {}


def _reductions() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    yield "aten.sum", (t(4, 8),), {}
    yield "aten.sum.dim_IntList", (t(4, 8, 12), (-1,), True), {}
    yield "aten.sum.dim_IntList", (t(4, 8, 12), (0, 2)), {}
    yield "aten.sum", (m(4, 8),), {}
    yield "aten.mean.dim", (t(4, 8, 12), (-1,), True), {}
    yield "aten.mean.dim", (t(4, 8, 12), (1, 2)), {}
    yield "aten.mean", (t(4, 8),), {}
    yield "aten.var.correction", (t(4, 8, 12), (-1,)), {"correction": 0, "keepdim": True}
    yield "aten.std.correction", (t(4, 8, 12), (1,)), {"correction": 1}
    for op in ("amax", "amin", "logsumexp"):
        yield f"aten.{op}", (t(4, 8, 12), (-1,), True), {}
    for op in ("max.dim", "min.dim", "argmax", "argmin", "any.dim", "all.dim"):
        yield f"aten.{op}", (t(4, 8, 12), 1), {}
    yield "aten.prod.dim_int", (t(4, 8, 4), -1), {}
    yield "aten.linalg_vector_norm", (t(4, 8, 12), 2, (-1,), True), {}
    yield "aten.norm.ScalarOpt_dim", (t(4, 8, 12), 3.0, (1,)), {}  # torch.pairwise_distance
    yield "aten.cumsum", (t(4, 8, 12), 1), {}
    yield "aten.cumsum", (i(5, 4, 8), -1), {}
    yield "aten.cumprod", (t(4, 8), 1), {}
    yield "aten.topk", (t(4, 8, 12), 3), {}
    yield "aten.topk", (t(4, 12, 8), 3, 1), {}
    yield "aten.diff", (i(5, 4, 8), 1, -1, i(5, 4, 1)), {}
    yield "aten.sort", (t(4, 8, 12), 1), {}


def _indexing() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    yield "aten.gather", (t(4, 8, 12), 2, i(12, 4, 8, 4)), {}
    yield "aten.gather", (t(4, 8), 1, i(8, 2, 4)), {}
    yield "aten.index_select", (t(4, 8, 12), 1, i(8, 4)), {}
    yield "aten.index.Tensor", (t(4, 8, 12), (None, i(8, 4))), {}
    yield "aten.index.Tensor", (t(4, 8, 12), (i(4, 4), i(8, 4))), {}
    yield "aten.index.Tensor", (t(4, 8, 12), (i(4, 4, 1), i(8, 8))), {}
    yield "aten.index.Tensor", (t(4, 8, 12), (i(4, 4), None, i(12, 4))), {}
    yield "aten.slice_scatter", (t(4, 8, 12), t(4, 6, 12), 1, 0, 6), {}
    yield "aten.select_scatter", (t(4, 8, 12), t(4, 12), 1, 3), {}
    yield "aten.scatter.value", (t(4, 8, 12), 2, i(12, 4, 8, 4), 1.0), {}
    yield "aten.scatter.src", (t(4, 8), 1, i(8, 4, 1), t(4, 1)), {}
    yield "aten.scatter_add", (t(4, 8, 12), 1, i(8, 4, 6, 12), t(4, 6, 12)), {}
    yield "aten.scatter_add", (t(8), 0, i(8, 16), t(16)), {}
    yield "aten.index_add", (t(4, 8, 12), 1, i(8, 4), t(4, 4, 12)), {}
    yield "aten.histc", (u(4, 8), 4, 0, 1), {}
    yield "aten.histc", (u(4, 8), 4), {}
    yield "aten.empty_like", (t(4, 8),), {}
    yield "aten.one_hot", (i(4, 4, 8), 4), {}
    yield "aten.arange", (8,), {}
    yield "aten.scalar_tensor", (2.0,), {}
    for op in ("zeros", "ones"):
        yield f"aten.{op}", ((4, 8),), {}
    yield "aten.full", ((4, 8), 2.0), {}
    yield "aten.empty.memory_format", ((4, 8),), {}
    for op in ("new_zeros", "new_ones", "new_empty"):
        yield f"aten.{op}", (t(2), (4, 8)), {}
    yield "aten.new_full", (t(2), (4, 8), 3.0), {}
