"""Removes operations without effect (copies, full slices), and gives views, casts and factories one form each."""

from __future__ import annotations

from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_rewrite, rewrite_nodes, size_args
from autopar.ir.graph import DType, Node, Ref, Value
from autopar.operations.pointwise import CAST
from autopar.operations.views import DETACH

_RESHAPES = (
    "aten.view",
    "aten._unsafe_view",
    "aten.reshape",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten._reshape_copy",
)
_COPIES = ("aten.clone", "aten.alias", "aten.lift_fresh_copy", "aten.contiguous", "aten.detach_", "aten.lift_fresh")
_NEW = ("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
_DROPOUT = ("aten.native_dropout", "aten.dropout", "ap.dropout")
_VIEWS = ("aten.reshape", "aten.expand", "aten.slice.Tensor", "aten.permute", "aten.to.dtype", "aten.squeeze.dims", "aten.pad")


def detaches(flat: FlatGraph) -> FlatGraph:
    """Detach what ``torch.no_grad()`` computes of values with gradients, where it is read outside. Other rewrites may then leave
    out or join the operations inside: no gradient gets through them."""
    values = flat.values()
    ends = set[str]()
    for node in flat.nodes:
        if node.no_grad and any(name in ends or values[name].differentiable for name in node.operands()):
            ends.update(value.name for value in node.outputs if value.dtype.lstrip("b").startswith(("float", "complex")))
    outside = {name for node in flat.nodes if not node.no_grad for name in node.operands()} & ends

    def step(node: Node) -> Rewritten | None:
        names = {value.name: f"{value.name}_detached" for value in node.outputs if value.name in outside}
        after = (
            replace(node, op=DETACH, args=(Ref(old),), kwargs=(), outputs=(replace(values[old], name=new),), no_grad=False)
            for old, new in names.items()
        )
        return (node, *after), names

    return rewrite_nodes(flat, step) if outside else flat


@node_rewrite
def casts(node: Node, graph: Lookup) -> Rewritten | None:
    """``_to_copy(x, dtype=d)`` and ``type_as(x, y)`` become ``to.dtype(x, d)``; without a dtype it is a copy."""
    if node.op == "aten.type_as":
        return replace(node, op="aten.to.dtype", args=(node.args[0], DType(node.outputs[0].dtype)), kwargs=())
    if node.op != "aten._to_copy":
        return None
    dtype = dict(node.kwargs).get("dtype")
    if not isinstance(dtype, DType):
        return (), {node.name: node.operands()[0]}
    return replace(node, op="aten.to.dtype", args=(node.args[0], dtype), kwargs=())


def equal_casts(flat: FlatGraph) -> FlatGraph:
    """A module that casts a tensor of its own twice (``x.float() * cos + rotate_half(x.float()) * sin``) does so once. Casts of
    what it reads from elsewhere (weights, masks) stay, so that calls of one module stay equal."""
    first: dict[tuple[object, ...], str] = {}
    producers = flat.producers()

    def step(node: Node) -> Rewritten | None:
        producer = producers.get(node.operands()[0]) if node.op == CAST else None
        if producer is None or not f"{producer.module}.".startswith(f"{node.module}." if node.module else ""):
            return None
        name = first.setdefault((node.module, node.args, node.kwargs, node.no_grad), node.name)
        return None if name == node.name else ((), {node.name: name})

    return rewrite_nodes(flat, step)


def reshapes(flat: FlatGraph) -> FlatGraph:
    """Every view that keeps the order of elements is ``reshape(x, sizes)``; a reshape of a reshape is one."""
    producers: dict[str, Node] = {}

    def step(node: Node) -> Rewritten | None:
        if node.op not in _RESHAPES:
            return None
        operand = node.operands()[0]
        while operand in producers:
            operand = producers[operand].operands()[0]
        new = replace(node, op="aten.reshape", args=(Ref(operand), size_args(node.outputs[0].shape)), kwargs=())
        producers[node.name] = new
        return new

    return rewrite_nodes(flat, step)


@node_rewrite
def squeezes(node: Node, graph: Lookup) -> Rewritten | None:
    """``squeeze`` names the dimensions that it removes: those of size 1 in the whole tensor, of which a rank may have a shard."""
    values = graph.values
    if node.op.split(".")[1] != "squeeze":
        return None
    shape = values[node.operands()[0]].shape
    asked = node.args[1] if len(node.args) > 1 else tuple(range(len(shape)))
    dims = {int(dim) % len(shape) for dim in (asked if isinstance(asked, tuple) else (asked,))} if shape else set()  # type: ignore[arg-type]
    removed = tuple(dim for dim in sorted(dims) if shape[dim] == 1)
    return replace(node, op="aten.squeeze.dims", args=(node.args[0], removed), kwargs=())


@node_rewrite
def broadcasts(node: Node, graph: Lookup) -> Rewritten | None:
    """``broadcast_tensors(a, b)`` vanishes for operands that have the common shape already."""
    if node.op != "aten.broadcast_tensors":
        return None
    operands = node.operands()
    if any(graph.values[name].shape != value.shape for name, value in zip(operands, node.outputs, strict=True)):
        return None
    return (), {value.name: name for name, value in zip(operands, node.outputs, strict=True)}


@node_rewrite
def group_norms(node: Node, graph: Lookup) -> Rewritten | None:
    """``native_group_norm(x, w, b, n, c, space, groups, eps)`` whose statistics nobody reads is ``group_norm``."""
    used = graph.uses
    if node.op != "aten.native_group_norm" or any(used.get(value.name) for value in node.outputs[1:]):
        return None
    x, weight, bias, *_, groups, eps = node.args
    args = (x, groups, weight, bias, eps)
    return replace(node, op="aten.group_norm", args=args, kwargs=(), outputs=node.outputs[:1])


@node_rewrite
def factories(node: Node, graph: Lookup) -> Rewritten | None:
    """``new_zeros(x, sizes)`` is ``zeros(sizes)`` of its dtype: it reads nothing of x, which need not be whole for it."""
    if node.op not in _NEW:
        return None
    kwargs = (("dtype", DType(node.outputs[0].dtype)),)
    return replace(node, op=node.op.replace("new_", ""), args=node.args[1:], kwargs=kwargs)


def without_dropout(flat: FlatGraph) -> FlatGraph:
    """The graph as a program in evaluation computes it."""
    return rewrite_nodes(flat, node_without_dropout)


def node_without_dropout(node: Node) -> Rewritten | None:
    """Dropout is left out, and attention's has probability zero."""
    if node.op in _DROPOUT:
        return (), {node.name: node.operands()[0]}
    if node.op != "aten.scaled_dot_product_attention":
        return None
    args = tuple(0.0 if index == 4 else arg for index, arg in enumerate(node.args))
    return replace(node, args=args, kwargs=tuple((k, 0.0 if k == "dropout_p" else v) for k, v in node.kwargs))


@node_rewrite
def no_ops(node: Node, graph: Lookup) -> Rewritten | None:
    """Operations that give back their operand are dropped; dropout gets one spelling."""
    values = graph.values
    operands = node.operands()
    if node.op in _DROPOUT:
        probability, active = node.args[1], node.args[2] if len(node.args) > 2 else True
        if probability == 0 or active is False:
            return (), {node.name: operands[0]}
        return replace(node, op="ap.dropout", args=(node.args[0], probability), kwargs=(), outputs=node.outputs[:1])
    if not operands or len(node.outputs) != 1:
        return None
    before, after = values[operands[0]], node.outputs[0]
    if not same_type(before, after) or (before.differentiable and not after.differentiable):
        return None
    if node.op in _COPIES or (node.op in _VIEWS and is_identity(node)) or is_neutral(node):
        return (), {node.name: operands[0]}
    return None


def same_type(before: Value, after: Value) -> bool:
    return before.shape == after.shape and before.dtype == after.dtype


def is_identity(node: Node) -> bool:
    """Return whether a view-like node that keeps shape and dtype keeps every element in place too."""
    if node.op == "aten.permute":
        dims = node.args[1]
        return isinstance(dims, tuple) and list(dims) == list(range(len(dims)))
    if node.op == "aten.pad":
        amounts = node.args[1]
        return isinstance(amounts, tuple) and all(amount == 0 for amount in amounts)
    return not (node.op == "aten.slice.Tensor" and len(node.args) > 4 and node.args[4] != 1)


def is_neutral(node: Node) -> bool:
    """``x + 0``, ``x - 0``, ``x * 1``, ``x / 1`` with a number."""
    if len(node.args) < 2 or isinstance(node.args[1], (bool, tuple)) or not isinstance(node.args[1], (int, float)):
        return False
    base = node.op.split(".")[1]
    return (base in ("add", "sub") and node.args[1] == 0) or (base in ("mul", "div") and node.args[1] == 1)
