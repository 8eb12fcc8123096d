"""Rewrites losses and means as sums over the batch and a count, so that shards of the batch give the loss of the whole batch."""

from __future__ import annotations

from dataclasses import replace

import sympy

from autopar.capture.flat import Lookup, Rewritten, node_like, node_rewrite, size_args
from autopar.ir.dims import Dim, as_dim, as_sympy, has_batch
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value, size_argument
from autopar.operations.losses import TOKEN_LOG_PROBS

_MEAN, _SUM = 1, 2
_LOG_SOFTMAX = ("aten.log_softmax", "aten._log_softmax")
_VIEWS = ("aten.reshape", "aten.squeeze", "aten.unsqueeze")
_SUMS_AND_DIFFERENCES = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Scalar")
_REDUCTION_AT = {
    **dict.fromkeys(("aten.l1_loss", "aten.smooth_l1_loss", "aten.huber_loss", "aten.kl_div"), 2),
    "aten.binary_cross_entropy": 3,
    "aten.binary_cross_entropy_with_logits": 4,
}
"""The place of the argument ``reduction`` of a loss. What is before it may be left out (class weights)."""


@node_rewrite
def cross_entropy(node: Node, graph: Lookup) -> Rewritten | None:
    """``cross_entropy_loss`` becomes ``cross_entropy_sum``, divided by ``count_valid`` for the mean, without flattening
    before."""
    if node.op != "aten.cross_entropy_loss":
        return None
    values = graph.values
    given = (*node.args, *(None, _MEAN, -100, 0.0)[len(node.args) - 2 :])
    options = dict(zip(("weight", "reduction", "ignore_index", "label_smoothing"), given[2:], strict=True)) | dict(node.kwargs)
    logits, target = node.operands()[:2]
    new: list[Node] = []
    if len(values[logits].shape) > 2:
        order = (0, *range(2, len(values[logits].shape)), 1)
        shape = tuple(values[logits].shape[dim] for dim in order)
        last = node_like(node, "aten.permute", (Ref(logits), order), f"{node.name}_last", shape)
        new.append(last)
        values[last.name] = last.outputs[0]
        logits = last.name
    logits, target = _unflattened(logits, target, graph)
    ignore = options["ignore_index"]
    args: tuple[Arg, ...] = (Ref(logits), Ref(target), ignore, options["label_smoothing"])
    if options["reduction"] == _SUM:
        return (*new, replace(node, op="ap.cross_entropy_sum", args=args, kwargs=())), {}
    total = node_like(node, "ap.cross_entropy_sum", args, f"{node.name}_sum", ())
    dtype = None if values[logits].dtype == "float32" else values[logits].dtype
    number = node_like(node, "ap.count_valid", (Ref(target), ignore), f"{node.name}_count", (), dtype, False)
    division = replace(node, op="aten.div.Tensor", args=(Ref(total.name), Ref(number.name)), kwargs=())
    return (*new, total, number, division), {}


def _unflattened(logits: str, target: str, graph: Lookup) -> tuple[str, str]:
    """The logits and targets before they were flattened to rows, where they were."""
    values, one, two = graph.values, graph.producers.get(logits), graph.producers.get(target)
    if one is None or one.op != "aten.reshape" or len(values[logits].shape) != 2:
        return logits, target
    wide = one.operands()[0]
    if values[wide].shape[-1:] != values[logits].shape[-1:]:
        return logits, target
    for candidate in (two.operands()[0] if two is not None and two.op == "aten.reshape" else "", target):
        if candidate and values[candidate].shape == values[wide].shape[:-1]:
            return wide, candidate
    return logits, target


@node_rewrite
def token_log_probs(node: Node, graph: Lookup) -> Rewritten | None:
    """``log_softmax(x, -1).gather(-1, index)`` and ``x.gather(-1, index) - logsumexp(x, -1)``, of one index a row, become
    ``token_log_probs(x, index)``, which may shard the classes."""
    if node.op == "aten.gather":
        logs = graph.producers.get(node.operands()[0])
        if logs is None or not logs.op.startswith(_LOG_SOFTMAX) or not _one_of_last(node, graph) or not _last(logs, graph):
            return None
        same = logs.no_grad == node.no_grad and logs.outputs[0].dtype == graph.values[logs.operands()[0]].dtype
        if not same or graph.uses[logs.name] > 1:
            return None
        return replace(node, op=TOKEN_LOG_PROBS, args=(logs.args[0], node.args[2]), kwargs=())
    if node.op != "aten.sub.Tensor" or len(node.operands()) < 2 or node.kwargs:
        return None
    one, two = (_without_reshapes(name, graph, node.no_grad) for name in node.operands())
    for selected, total, sign in ((one, two, 1), (two, one, -1)):
        if selected is None or total is None or (selected.op, total.op) != ("aten.gather", "aten.logsumexp"):
            continue
        same = selected.operands()[0] == total.operands()[0]
        if not same or not _one_of_last(selected, graph) or not _last(total, graph):
            return None
        result, x = node.outputs[0], graph.values[total.operands()[0]]
        index = graph.values[selected.operands()[1]]
        if graph.uses[selected.name] > 1 or graph.uses[total.name] > 1 or result.dtype != x.dtype:
            return None
        if result.shape not in (index.shape, index.shape[:-1]):
            return None
        new = node_like(node, TOKEN_LOG_PROBS, (total.args[0], selected.args[2]), f"{node.name}_of_tokens", index.shape)
        view = node_like(node, "aten.reshape", (Ref(new.name), size_args(result.shape)), f"{node.name}_each", result.shape)
        last = view if sign > 0 else node_like(node, "aten.neg", (Ref(view.name),), f"{node.name}_loss", result.shape)
        return (new, view, *((last,) if sign < 0 else ())), {result.name: last.name}
    return None


def _last(node: Node, graph: Lookup) -> bool:
    """Whether an operation is along the last dimension of its operand."""
    dims = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    rank = max(1, len(graph.values[node.operands()[0]].shape))
    return [isinstance(dim, int) and dim % rank for dim in dims] == [rank - 1]


def _one_of_last(gather: Node, graph: Lookup) -> bool:
    """Whether it takes one element of each row."""
    x, index = (graph.values[name] for name in gather.operands())
    return _last(gather, graph) and index.shape == (*x.shape[:-1], 1)


def _without_reshapes(name: str, graph: Lookup, no_grad: bool) -> Node | None:
    """The operation that makes a value, before it is reshaped, where nothing else reads it; None where gradients end between."""
    node = graph.producers.get(name)
    while node is not None and node.no_grad == no_grad and node.op.startswith(_VIEWS) and graph.uses[node.operands()[0]] == 1:
        node = graph.producers.get(node.operands()[0])
    return node if node is not None and node.no_grad == no_grad else None


@node_rewrite
def mean_losses(node: Node, graph: Lookup) -> Rewritten | None:
    """``smooth_l1_loss(a, b)`` becomes ``smooth_l1_loss(a, b, 2)`` divided by the number of elements."""
    at = _REDUCTION_AT.get(node.op)
    if at is None:
        return None
    named = dict(node.kwargs)
    reduction = node.args[at] if len(node.args) > at else named.pop("reduction", _MEAN)
    if reduction != _MEAN:
        return None
    before = (*node.args, *(None,) * at)[:at]
    kwargs = tuple((name, arg) for name, arg in named.items() if name != "reduction")
    summed = replace(node, args=(*before, _SUM, *node.args[at + 1 :]), kwargs=kwargs)
    return _averaged(node, summed, list(graph.values[node.operands()[0]].shape))


@node_rewrite
def constant_terms(node: Node, graph: Lookup) -> Rewritten | None:
    """``loss + 1`` and ``1 - loss`` of one element become sums of two values: of a number itself no rank, and no micro-batch, can
    add a share."""
    result = node.outputs[0]
    if node.op not in _SUMS_AND_DIFFERENCES or result.shape or not result.differentiable or len(node.args) != 2 or node.kwargs:
        return None
    x, number = node.args
    if not isinstance(x, Ref) or not isinstance(number, int | float | Symbol):
        return None
    term = node_like(node, "aten.full", ((), number), f"{result.name}_constant", (), flows=False)
    term = replace(term, kwargs=(("dtype", DType(result.dtype)),))
    if node.op == "aten.rsub.Scalar":
        return (term, replace(node, op="aten.sub.Tensor", args=(Ref(term.name), x))), {}
    return (term, replace(node, op=node.op.replace("Scalar", "Tensor"), args=(x, Ref(term.name)))), {}


@node_rewrite
def full_means(node: Node, graph: Lookup) -> Rewritten | None:
    """A mean over the batch becomes a sum and a division by the number of elements, which depends on the batch size only."""
    if node.op not in ("aten.mean", "aten.mean.dim"):
        return None
    operand, result = graph.values[node.operands()[0]], node.outputs[0]
    rank = len(operand.shape)
    if not rank and operand.dtype == result.dtype:
        return (), {result.name: operand.name}
    dims = node.args[1] if node.op == "aten.mean.dim" and len(node.args) > 1 and node.args[1] is not None else None
    reduced = [int(dim) % rank for dim in dims] if isinstance(dims, tuple) and dims else list(range(rank))  # type: ignore[arg-type]
    if node.op == "aten.mean.dim" and not any(has_batch(operand.shape[dim]) for dim in reduced):
        return None
    keep = len(node.args) > 2 and bool(node.args[2])
    args: tuple[Arg, ...] = (node.args[0],) if result.shape == () else (node.args[0], tuple(reduced), keep)
    op = "aten.sum" if result.shape == () else "aten.sum.dim_IntList"
    return _averaged(node, replace(node, op=op, args=args, kwargs=()), [operand.shape[dim] for dim in reduced])


def _averaged(node: Node, summed: Node, shape: list[Dim]) -> Rewritten:
    """The result of `node`, as the sum over the number of elements of `shape`, which is in B where it depends on it."""
    result = node.outputs[0]
    total = Value(f"{result.name}_sum", result.shape, result.dtype, result.differentiable)
    number = size_argument(as_dim(sympy.prod([as_sympy(dim) for dim in shape])))
    division = replace(node, op="aten.div.Tensor", args=(Ref(total.name), number), kwargs=())
    return (replace(summed, outputs=(total,)), division), {}
