"""Reads the expressions of a forward: which operation a line applies to which arguments. Refuses everything else."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from autopar.checker.rows.operation_call import DTypeName
from autopar.checker.shards import Kinds, Shape, words_of
from autopar.checker.text import refuse

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow", ast.Mod: "remainder", ast.Eq: "eq",
    ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or", ast.BitXor: "bitwise_xor",
}  # fmt: skip
CANONICAL = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "true_divide": "div", "__and__": "bitwise_and", "__or__": "bitwise_or",
    "__xor__": "bitwise_xor", "view": "reshape", "_unsafe_view": "reshape", "divide": "div", "multiply": "mul",
}  # fmt: skip
"""Other names of operations."""
_SIZES_METHODS = frozenset(["reshape", "view", "permute", "expand", "repeat"])
OWN_OPERATIONS = frozenset(
    words_of("""attention attention_documents attention_documents_ring attention_dropout attention_heads attention_ring
    attention_rows cond constant convert convert_many count_valid ctc_losses cross_entropy_sharded cross_entropy_sum
    document_numbers dropout embedding_sharded expert_capacity histogram linear_cross_entropy_sharded
    linear_cross_entropy_sum linear_float8_dynamic linear_kn local_mean logsumexp_sharded moe_experts
    moe_experts_dispatched moe_experts_owned moe_experts_start moe_experts_wait opaque random rotary_embedding start
    token_log_probs token_log_probs_sharded wait while_loop adaptive_avg_pool_space avg_pool_halo convolution_halo
    group_norm_space instance_norm_space interpolate_halo max_pool_halo mean_space transposed_convolution_halo""")
)
MESH, DEVICE, TRAINING = "self.mesh", "self.mesh.device", "self.training"
END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the program: the value of the captured block that it is, whole shape, kinds on all axes, and what one rank
    holds (a tensor on the meta device, whose `requires_grad` is autograd's). `stored`: a parameter in the dtype of its storage.
    `pending`: what was started, a conversion or an exchange of tokens."""

    value: str
    shape: Shape
    kinds: Kinds
    local: torch.Tensor
    stored: bool = False
    pending: str = ""
    others: tuple[Kinds, ...] = ()
    """Further kinds that it is too: a tensor of equal numbers is any part of itself."""


@dataclass(frozen=True, slots=True)
class AxisName:
    """A mesh axis as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """``self.mesh``, ``self.training`` or the device."""

    what: str


@dataclass(frozen=True, slots=True)
class Applied:
    """One operation of the text: ``aten.add`` or ``ap.convert`` with its arguments."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    line: int
    recomputed: bool = False


@dataclass(slots=True)
class Reader:
    """Knows the variables of a forward so far, and the parameters by attribute."""

    axes: frozenset[str]
    parameters: Mapping[str, PlacedTensor]
    variables: dict[str, Any] = field(default_factory=dict)

    def applied(self, node: ast.expr) -> Applied | PlacedTensor | int:
        """What the right-hand side of a statement applies; or the variable or number that it is."""
        if isinstance(node, ast.Call):
            return self._call(node, node.func, list(node.args), node.keywords)
        if isinstance(node, ast.Subscript):
            return self._subscript(node)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._infix(node, node.left, node.ops[0], node.comparators[0])
        if isinstance(node, ast.BinOp) and not self._is_number(node):
            return self._infix(node, node.left, node.op, node.right)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not self._is_number(node):
            return Applied("aten.neg", (self.value(node.operand),), {}, node.lineno)
        found = self.value(node)
        if isinstance(found, (PlacedTensor, int)):
            return found
        raise refuse(node, f"{ast.unparse(node)[:60]} is no operation of a program")

    def _infix(self, node: ast.expr, left: ast.expr, symbol: ast.AST, right: ast.expr) -> Applied:
        name = _OPERATORS.get(type(symbol))
        if name is None:
            raise refuse(node, f"{ast.unparse(node)[:60]} is no operation of a program")
        scaled = isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult) and not self._is_number(right)
        if isinstance(right, ast.BinOp) and scaled and name in ("add", "sub"):
            kwargs = {"alpha": self.value(right.left)}
            return Applied(f"aten.{name}", (self.value(left), self.value(right.right)), kwargs, node.lineno)
        return Applied(f"aten.{name}", (self.value(left), self.value(right)), {}, node.lineno)

    def _is_number(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp):
            return self._is_number(node.left) and self._is_number(node.right)
        if isinstance(node, ast.UnaryOp):
            return self._is_number(node.operand)
        if isinstance(node, ast.Name):
            return isinstance(self.variables.get(node.id), int)
        if isinstance(node, ast.Subscript):
            return ast.unparse(node.value).endswith(".shape")
        return isinstance(node, ast.Constant)

    def value(self, node: ast.expr) -> Any:
        """The value of an argument."""
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, bool, str, type(None))):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(each) for each in node.elts)
        if isinstance(node, ast.Name):
            if node.id not in self.variables:
                raise refuse(node, f"{node.id} is not defined")
            return self.variables[node.id]
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.Subscript):  # x.shape[0]
            return self._size(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and len(node.args) == 1:
            text = self.value(node.args[0])
            return float(text if text in ("inf", "-inf", "nan") else self._number(node.args[0]))
        raise refuse(node, f"{ast.unparse(node)[:60]} is no argument of a program")

    def _number(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or (isinstance(found, int) and abs(found) >= 2**64):
            raise refuse(node, f"{ast.unparse(node)[:60]} is no number of 64 bits")
        return found

    def _arithmetic(self, node: ast.BinOp) -> Any:
        left, right = self._number(node.left), self._number(node.right)
        kind = type(node.op)
        if kind is ast.FloorDiv and isinstance(left, int) and isinstance(right, int) and right:
            if left % right:
                raise refuse(node, f"{ast.unparse(node)} is no whole number at this batch")
            return left // right
        if kind is ast.Div and right:
            return left / right
        if kind in (ast.Add, ast.Sub, ast.Mult) or (kind is ast.Pow and 0 <= right < 5):
            return (
                {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}[kind]
                if kind is not ast.Pow
                else left**right
            )
        raise refuse(node, f"{ast.unparse(node)[:60]} is no size")

    def _size(self, node: ast.Subscript) -> int:
        inner = node.value
        if isinstance(inner, ast.Attribute) and inner.attr == "shape" and isinstance(node.slice, ast.Constant):
            tensor = self.value(inner.value)
            if isinstance(tensor, PlacedTensor) and isinstance(node.slice.value, int) and node.slice.value < tensor.local.dim():
                return tensor.local.shape[node.slice.value]
        raise refuse(node, f"{ast.unparse(node)[:60]} is no size")

    def _attribute(self, node: ast.Attribute) -> Any:
        text = ast.unparse(node)
        if text in (MESH, DEVICE, TRAINING):
            return Fixed(text)
        if text.startswith("self.mesh.") and node.attr in self.axes:
            return AxisName(node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.parameters:
            return self.parameters[node.attr]
        if text.startswith("torch.") and isinstance(getattr(torch, node.attr, None), torch.dtype):
            return DTypeName(node.attr)
        raise refuse(node, f"{text[:60]} is nothing that a program reads")

    # -- calls

    def _call(self, node: ast.Call, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]) -> Applied:
        if isinstance(function, ast.Name) and function.id == "recompute" and args:
            return self._recomputed(node, args, keywords)
        if not isinstance(function, ast.Attribute):
            raise refuse(node, f"{ast.unparse(function)[:60]} is no operation of a program")
        text, kwargs = ast.unparse(function), {str(each.arg): self.value(each.value) for each in keywords}
        root = text.split(".")[0]
        if text.startswith("torch.ops."):
            return self._plain(node, text.removeprefix("torch.ops.").removesuffix(".default"), args, kwargs)
        if text in ("self.split_backward.linear", "self.split_backward.linear_kn"):
            return self._plain(node, f"{'ap' if function.attr == 'linear_kn' else 'aten'}.{function.attr}", args, kwargs)
        if root in ("F", "torch") and text.count(".") == 1 and root not in self.variables:
            return self._of_torch(node, function.attr, args, kwargs)
        if root == "C" and text.count(".") == 1 and root not in self.variables:
            return self._of_runtime(node, function.attr, [self.value(each) for each in args], kwargs)
        owner = self.value(function.value)
        if not isinstance(owner, PlacedTensor):
            raise refuse(node, f"{text[:60]} is no method of a tensor")
        return self._method(node, function.attr, [owner, *(self.value(each) for each in args)], kwargs)

    def _plain(self, node: ast.Call, op: str, args: list[ast.expr], kwargs: dict[str, Any]) -> Applied:
        return Applied(op, tuple(self.value(each) for each in args), kwargs, node.lineno)

    def _of_torch(self, node: ast.Call, name: str, args: list[ast.expr], kwargs: dict[str, Any]) -> Applied:
        values = [self.value(each) for each in args]
        if ast.unparse(node.func).startswith("F.") and _other_positions(name, len(values)):
            raise refuse(node, f"F.{name} takes other arguments at these positions than the operation")
        if name == "embedding":
            values[0], values[1] = values[1], values[0]
        if isinstance(kwargs.get("device"), Fixed):
            kwargs = {key: each for key, each in kwargs.items() if key != "device"}
        return Applied(f"aten.{name}", tuple(values), kwargs, node.lineno)

    def _method(self, node: ast.Call, name: str, values: list[Any], kwargs: dict[str, Any]) -> Applied:
        if name in _SIZES_METHODS and all(isinstance(each, int) for each in values[1:]):
            values = [values[0], tuple(values[1:])]
        return Applied(f"aten.{name}", tuple(values), kwargs, node.lineno)

    def _of_runtime(self, node: ast.Call, name: str, values: list[Any], kwargs: dict[str, Any]) -> Applied:
        """A function of the runtime. The mode, the mesh and the axes of random numbers become arguments with names."""
        if name not in OWN_OPERATIONS:
            raise refuse(node, f"C.{name} is no function of the runtime")
        last: dict[str, Any] = {}
        if name in ("dropout", "random"):
            *values, made, mesh, axes = values
            last = {"sharded_axes": axes, **({"dtype": made} if name == "random" else {"mode": made})}
            self._require(node, mesh == Fixed(MESH) and (name == "random" or made == Fixed(TRAINING)))
        elif name == "attention_dropout":
            q, k, v, mode, mesh, axes = values
            self._require(node, mesh == Fixed(MESH) and mode == Fixed(TRAINING))
            return Applied("aten.scaled_dot_product_attention", (q, k, v), {**kwargs, "sharded_axes": axes}, node.lineno)
        elif name in ("constant", "opaque"):
            *values, mesh = values
            self._require(node, mesh == Fixed(MESH))
            if name == "constant":
                *values, last["dtype"] = values
        elif name == "histogram":
            return Applied("aten.histc", tuple(values), kwargs, node.lineno)
        return Applied(f"ap.{name}", tuple(values), {**kwargs, **last}, node.lineno)

    @staticmethod
    def _require(node: ast.Call, right: bool) -> None:
        if not right:
            raise refuse(node, f"{ast.unparse(node)[:60]} is not written as programs write it")

    def _recomputed(self, node: ast.Call, args: list[ast.expr], keywords: list[ast.keyword]) -> Applied:
        function, *rest = args
        if isinstance(function, ast.Lambda):
            names = [each.arg for each in function.args.args]
            if len(names) != len(rest) or keywords:
                raise refuse(node, "the arguments of what is recomputed are not those of its lambda")
            inner = Reader(self.axes, {}, {**{k: v for k, v in self.variables.items() if isinstance(v, (int, AxisName))},
                                           **dict(zip(names, map(self.value, rest), strict=True))})  # fmt: skip
            found = inner.applied(function.body)
        elif ast.unparse(function).startswith("Tensor.") and isinstance(function, ast.Attribute):
            values = [self.value(each) for each in rest]
            found = self._method(node, function.attr, values, {str(each.arg): self.value(each.value) for each in keywords})
        else:
            found = self._call(node, function, rest, keywords)
        if not isinstance(found, Applied):
            raise refuse(node, "nothing is recomputed here")
        return Applied(found.op, found.args, found.kwargs, node.lineno, recomputed=True)

    # -- subscripts

    def _subscript(self, node: ast.Subscript) -> Applied | int:
        if ast.unparse(node.value).endswith(".shape"):
            return self._size(node)
        tensor = self.value(node.value)
        if not isinstance(tensor, PlacedTensor):
            raise refuse(node, f"{ast.unparse(node)[:60]} is no part of a tensor")
        items = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if items and isinstance(items[0], ast.Constant) and items[0].value is Ellipsis:
            at = len(items) - 1
            items = [*(ast.Slice() for _ in range(tensor.local.dim() - at)), *items[1:]]
        named = [(dim, each) for dim, each in enumerate(items) if not isinstance(each, ast.Slice) or ast.unparse(each) != ":"]
        dim, part = named[0] if len(named) == 1 else (0, None)
        if isinstance(part, ast.Slice):
            start, stop, step = (None if each is None else self._number(each) for each in (part.lower, part.upper, part.step))
            return Applied("aten.slice", (tensor, dim, start or 0, END if stop is None else stop, step or 1), {}, node.lineno)
        values = [(dim, self.value(each)) for dim, each in named]
        if len(values) == 1 and isinstance(values[0][1], int):
            return Applied("aten.select", (tensor, *values[0]), {}, node.lineno)
        if values and all(isinstance(each, PlacedTensor) for _, each in values):
            found = dict(values)
            return Applied("aten.index", (tensor, tuple(found.get(dim) for dim in range(max(found) + 1))), {}, node.lineno)
        if not values:
            return Applied("aten.slice", (tensor, 0, 0, END, 1), {}, node.lineno)
        raise refuse(node, f"{ast.unparse(node)[:60]} is no part of a tensor")


@cache
def _other_positions(name: str, count: int) -> bool:
    """Whether one of the first arguments of ``F.name`` is none of the operation's: a flag of the function alone."""
    function = getattr(F, name, None)
    if not isinstance(function, FunctionType):
        return False
    return bool(set(list(signature(function).parameters)[:count]) & {"inplace", "training", "max_norm", "_stacklevel"})
