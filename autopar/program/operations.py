"""The table of operations: how each is written as the torch code that a person would write."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from autopar.ir.graph import Node, Ref

SLICE_END = 2**62


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A node with its arguments as source text."""

    node: Node
    args: tuple[str, ...]
    kwargs: dict[str, str]

    @property
    def packet(self) -> str:
        return self.node.op.split(".")[1]

    def has(self, index: int) -> bool:
        return len(self.args) > index and self.args[index] != "None"

    def listed(self, start: int = 0, stop: int | None = None) -> str:
        """The arguments of a call from `start` on, and the keyword arguments."""
        return ", ".join([*self.args[start:stop], *(f"{name}={text}" for name, text in self.kwargs.items())])


ExpressionWriter = Callable[[OperationCall], str | None]
"""Writes the expression of a node; None where its arguments do not fit this form."""


# -- shapes of writers


def _infix(symbol: str) -> ExpressionWriter:
    def write(call: OperationCall) -> str | None:
        scale = call.kwargs.get("alpha") or (call.args[2] if len(call.args) > 2 else "1")
        if len(call.args) < 2 or set(call.kwargs) - {"alpha"} or (scale != "1" and symbol not in "+-"):
            return None
        a, b = (_atom(text) for text in call.args[:2])
        return f"{a} {symbol} {b}" if scale == "1" else f"{a} {symbol} {scale} * {b}"

    return write


def _atom(text: str) -> str:
    """`text` as an operand."""
    simple = re.fullmatch(r"[\w.]+|-?[\d.]+(e-?\d+)?|[\w.]+\(.*\)", text) and not text.startswith("-")
    return text if simple else f"({text})"


def _reversed(call: OperationCall) -> str | None:
    return f"{_atom(call.args[1])} - {_atom(call.args[0])}" if len(call.args) == 2 and not call.kwargs else None


def _method(name: str | None = None) -> ExpressionWriter:
    def write(call: OperationCall) -> str | None:
        return f"{_atom(call.args[0])}.{name or call.packet}({call.listed(1)})" if isinstance(call.node.args[0], Ref) else None

    return write


def _function(prefix: str) -> ExpressionWriter:
    return lambda call: f"{prefix}.{call.packet}({call.listed()})"


def _factory(call: OperationCall) -> str:
    kwargs = {"dtype": f"torch.{call.node.outputs[0].dtype}"} | call.kwargs | {"device": "self.mesh.device"}
    return f"torch.{call.packet}({', '.join([*call.args, *(f'{name}={text}' for name, text in kwargs.items())])})"


def _new_factory(call: OperationCall) -> str:
    kwargs = {"dtype": f"torch.{call.node.outputs[0].dtype}"} | call.kwargs
    listed = ", ".join([*call.args[1:], *(f"{name}={text}" for name, text in kwargs.items())])
    return f"{_atom(call.args[0])}.{call.packet}({listed})"


# -- operations with a form of their own


def _subscript(dim: int, index: str) -> str:
    return f"[{', '.join([':'] * dim + [index])}]" if dim >= 0 else f"[..., {', '.join([index] + [':'] * (-dim - 1))}]"


def _slice(call: OperationCall) -> str | None:
    args = call.node.args
    dim = args[1] if len(args) > 1 else 0
    if call.kwargs or not isinstance(dim, int):
        return None
    start = call.args[2] if call.has(2) and args[2] != 0 else ""
    end = args[3] if len(args) > 3 else None
    stop = "" if end is None or (isinstance(end, int) and not isinstance(end, bool) and end > SLICE_END) else call.args[3]
    step = f":{call.args[4]}" if call.has(4) and args[4] != 1 else ""
    return f"{_atom(call.args[0])}{_subscript(dim, f'{start}:{stop}{step}')}"


def _select(call: OperationCall) -> str | None:
    dim = call.node.args[1]
    return None if call.kwargs or not isinstance(dim, int) else f"{_atom(call.args[0])}{_subscript(dim, call.args[2])}"


def _index(call: OperationCall) -> str | None:
    indices = call.node.args[1]
    if not isinstance(indices, tuple) or call.kwargs:
        return None
    inside = call.args[1][1:-1].rstrip(",")
    words = [":" if index is None else word for index, word in zip(indices, inside.split(", "), strict=True)]
    return f"{_atom(call.args[0])}[{', '.join(words)}]"


def _attention(call: OperationCall) -> str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    q, k, v = (given.pop(name) for name in names[:3])
    axes = given.pop("sharded_axes", None)
    defaults = {"attn_mask": "None", "dropout_p": "0.0", "is_causal": "False", "scale": "None", "enable_gqa": "False"}
    shown = [f"{name}={text}" for name, text in given.items() if defaults.get(name) != text]
    if axes is not None:
        return f"C.attention_dropout({', '.join([q, k, v, 'self.training', 'self.mesh', axes, *shown])})"
    return f"F.scaled_dot_product_attention({', '.join([q, k, v, *shown])})"


def _layer_norm(call: OperationCall) -> str | None:
    return None if call.kwargs else f"F.layer_norm({', '.join(call.args[:5])})"


def _group_norm(call: OperationCall) -> str | None:
    return None if call.kwargs else f"F.group_norm({', '.join(call.args[:5])})"


def _embedding(call: OperationCall) -> str | None:
    padding = call.args[2] if len(call.args) > 2 else "-1"
    if set(call.kwargs) - {"padding_idx"}:
        return None
    padding = call.kwargs.get("padding_idx", padding)
    tail = f", padding_idx={padding}" if padding not in ("-1", "None") else ""
    return f"F.embedding({call.args[1]}, {call.args[0]}{tail})"


def _softmax(name: str) -> ExpressionWriter:
    def write(call: OperationCall) -> str | None:
        if len(call.args) < 2 or call.kwargs:
            return None
        wide = ", dtype=torch.float32" if len(call.args) > 2 and call.args[2] == "True" else ""
        return f"{_atom(call.args[0])}.{name}({call.args[1]}{wide})"

    return write


def _convolution(call: OperationCall) -> str | None:
    args = call.node.args
    if len(args) != 9 or call.kwargs or args[6] is not False or not isinstance(args[3], tuple):
        return None
    shown = [*call.args[:6], call.args[8]]
    return f"F.conv{len(args[3])}d({', '.join(shown)})"


def _div(call: OperationCall) -> str | None:
    return None if call.kwargs else _infix("/")(call)


def _runtime(call: OperationCall) -> str:
    """An operation of autopar: the function of that name in the runtime. Its `axis` is a mesh axis, a variable of the forward."""
    kwargs = dict(call.kwargs)
    if "axis" in kwargs:
        kwargs["axis"] = str(dict(call.node.kwargs)["axis"])
    return f"C.{call.packet}({', '.join([*call.args, *(f'{name}={text}' for name, text in kwargs.items())])})"


def _experts(call: OperationCall) -> str:
    """``C.moe_experts(x, experts, weights, up, down, activation="silu", layout="halves")``."""
    names = ("activation", "layout", "capacity")
    matrices = call.args[:5] if call.args[5:7] == ("None", "None") else call.args[:7]
    options = {name: text for name, text in zip(names, call.args[7:], strict=False) if text != "None"} | call.kwargs
    if "axis" in options:
        options["axis"] = str(dict(call.node.kwargs)["axis"])
    return f"C.{call.packet}({', '.join([*matrices, *(f'{name}={text}' for name, text in options.items())])})"


def _convert(call: OperationCall) -> str:
    axis, change = (str(dict(call.node.kwargs)[name]) for name in ("axis", "conversion"))
    return f'C.{call.packet}({call.args[0]}, {axis}, "{change}")'


def _dropout(call: OperationCall) -> str:
    return f"C.dropout({call.args[0]}, {call.args[1]}, self.training, self.mesh, {call.kwargs.get('sharded_axes', '()')})"


def _random(call: OperationCall) -> str:
    drawn = ", ".join(call.args[1:])
    axes, dtype = call.kwargs.get("sharded_axes", "()"), call.node.outputs[0].dtype
    return f"C.random({call.args[0]}, {drawn}, torch.{dtype}, self.mesh, {axes})"


def _constant(call: OperationCall) -> str:
    return f"C.constant({call.args[0]}, {call.args[1]}, torch.{call.node.outputs[0].dtype}, self.mesh)"


def _adaptive_pool(call: OperationCall) -> str | None:
    """``F.adaptive_avg_pool2d(x, (1, 1))``, which is stricter than the operation about tensors of two dimensions."""
    return _function("F")(call) if len(call.node.outputs[0].shape) > 2 else None


def _shape_method(call: OperationCall) -> str | None:
    """``x.reshape(B, 16, 64)``."""
    sizes = call.args[1][1:-1].rstrip(",") if len(call.args) == 2 and isinstance(call.node.args[1], tuple) else ""
    return f"{_atom(call.args[0])}.{call.packet}({sizes})" if sizes and not call.kwargs else None


METHODS = """transpose unsqueeze squeeze expand_as to type_as detach clone contiguous sum mean amax amin
argmax argmin max min any all var std rsqrt sqrt exp log cos sin tanh sigmoid abs square reciprocal cumsum gather scatter
scatter_add index_select index_add masked_fill clamp clamp_min clamp_max tril triu split split_with_sizes chunk unbind
roll flip t narrow topk sort logical_not bitwise_not erf floor ceil round sign matmul bmm mm softmax log_softmax float
flatten unflatten new_zeros new_ones new_empty new_full norm logsumexp repeat_interleave isnan isinf"""
FUNCTIONS = """cat stack where outer maximum minimum logical_and logical_or logical_xor addmm baddbmm full_like zeros_like
ones_like empty_like conv1d conv2d conv3d nan_to_num floor_divide"""
FUNCTIONAL = """linear gelu silu relu relu6 elu mish softplus hardswish hardsigmoid leaky_relu max_pool2d avg_pool2d
adaptive_avg_pool2d one_hot rms_norm pad glu"""
FACTORIES = "arange full zeros ones empty scalar_tensor rand randn eye linspace logspace tril_indices triu_indices"
INFIX = {
    "aten.add": "+", "aten.sub": "-", "aten.mul": "*", "aten.pow": "**", "aten.remainder": "%",
    "aten.eq": "==", "aten.ne": "!=", "aten.lt": "<", "aten.le": "<=", "aten.gt": ">", "aten.ge": ">=",
    "aten.bitwise_and": "&", "aten.bitwise_or": "|", "aten.bitwise_xor": "^", "aten.__and__": "&", "aten.__or__": "|",
}  # fmt: skip

EXPRESSION_WRITERS: dict[str, ExpressionWriter] = {
    **{f"aten.{name}": _method() for name in METHODS.split()},
    **{f"aten.{name}": _function("torch") for name in FUNCTIONS.split()},
    **{f"aten.{name}": _function("F") for name in FUNCTIONAL.split()},
    **{f"aten.{name}": _factory for name in FACTORIES.split()},
    **{f"aten.{name}": _new_factory for name in ("new_zeros", "new_ones", "new_empty", "new_full")},
    **{f"aten.{name}": _shape_method for name in ("reshape", "permute", "expand", "repeat")},
    **{op: _infix(symbol) for op, symbol in INFIX.items()},
    **{f"ap.{name}": _convert for name in ("convert", "convert_many", "start")},
    **{f"ap.{name}": _runtime for name in ("wait", "linear_kn", "linear_float8_dynamic", "count_valid", "cross_entropy_sum")},
    **{f"ap.{name}": _runtime for name in ("cross_entropy_sharded", "embedding_sharded")},
    **{f"ap.{name}": _runtime for name in ("attention", "attention_ring", "attention_rows", "attention_heads")},
    **{f"ap.{name}": _runtime for name in ("convolution_halo", "transposed_convolution_halo", "interpolate_halo")},
    **{f"ap.{name}": _runtime for name in ("max_pool_halo", "avg_pool_halo", "group_norm_space", "instance_norm_space")},
    **{f"ap.{name}": _runtime for name in ("mean_space", "adaptive_avg_pool_space")},
    **{f"ap.moe_experts{form}": _experts for form in ("", "_owned", "_dispatched", "_start")},
    **{f"ap.{name}": _runtime for name in ("moe_experts_wait", "expert_capacity", "ctc_losses")},
    "aten.histc": lambda call: f"C.histogram({call.listed()})",
    "ap.opaque": lambda call: f"C.opaque({call.listed()}, self.mesh)",
    "ap.cond": _runtime,
    "ap.while_loop": _runtime,
    "ap.dropout": _dropout,
    "ap.random": _random,
    "ap.constant": _constant,
    "ap.local_mean": _runtime,
    "aten.div": _div,
    "aten.true_divide": _div,
    "aten.rsub": _reversed,
    "aten.neg": lambda call: f"-{_atom(call.args[0])}",
    "aten.slice": _slice,
    "aten.select": _select,
    "aten.index": _index,
    "aten.scaled_dot_product_attention": _attention,
    "aten.layer_norm": _layer_norm,
    "aten.group_norm": _group_norm,
    "aten.embedding": _embedding,
    "aten.adaptive_avg_pool2d": _adaptive_pool,
    "aten._softmax": _softmax("softmax"),
    "aten._log_softmax": _softmax("log_softmax"),
    "aten.convolution": _convolution,
}
"""By operation, or by packet for all its overloads."""
