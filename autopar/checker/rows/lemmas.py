"""Functions that compute a captured operation by another algorithm, on one axis: each is a lemma.

A `Lemma` says which operation the function stands for, what its operands must be on its axis, and what its result is there. On
all other axes the row of the operation holds, with the dimension that the function works along as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autopar.checker.rows.carry import Dims, OperationRow
from autopar.checker.rows.elements import reduction
from autopar.checker.rows.images import convolution, halo_fits, image, without_running
from autopar.checker.rows.operation_call import WholeCall
from autopar.checker.rows.products import (
    attention,
    attention_documents,
    cross_entropy_sum,
    embedding,
    group_norm,
    instance_norm,
    moe_experts,
    token_log_probs,
)
from autopar.checker.shards import INVARIANT, PARTIAL, REPLICATED, Cut, Kind, equal_kind

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Unfit(ValueError):
    """What is wrong with the operands of a function."""


@dataclass(frozen=True, slots=True)
class Lemma:
    """A function of the runtime. `whole` puts the arguments of the text in the order of the operation `of`; `on_axis` makes the
    kind of the result of those of the operands, the axis size and whether gradients come back; `row` holds on the other axes.
    `proof` says where it is proven."""

    name: str
    of: str
    whole: Callable[[Sequence[Any], Mapping[str, Any]], Arguments]
    on_axis: Callable[[WholeCall, Sequence[Kind], int, Sequence[bool]], Kind]
    row: Callable[[WholeCall], OperationRow]
    proof: str = "execution: tests/checker/test_lemmas.py"


def _as_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    return tuple(args), {name: each for name, each in kwargs.items() if name not in ("axis", "dim")}


def _contiguous(call: WholeCall, operand: int, dim: int, kind: Kind, size: int) -> int:
    """The dimension, where the operand is cut along it into as many parts as there are ranks, in their order."""
    shape = call.shapes[operand]
    dim %= len(shape)
    if kind != Cut(dim, shape[dim] // size) or shape[dim] % size:
        raise Unfit(f"operand {operand + 1} must be cut along dimension {dim} in the order of the ranks, and is {kind}")
    return dim


def _equal(operands: Sequence[int], kinds: Sequence[Kind], flows: Sequence[bool]) -> None:
    for index in operands:
        if index < len(kinds) and (not equal_kind(kinds[index]) or (flows[index] and kinds[index] != REPLICATED)):
            raise Unfit(f"operand {index + 1} must be replicated, and is {kinds[index]}")


def _embedding_whole(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    padding = kwargs.get("padding_idx")
    return (args[1], args[0], -1 if padding is None else padding), {}


def _embedding(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    _contiguous(call, 0, 0, kinds[0], size)
    _equal((1,), kinds, flows)
    return PARTIAL


def _cross_entropy(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    _contiguous(call, 0, -1, kinds[0], size)
    _equal((1,), kinds, flows)
    return INVARIANT


def _logsumexp(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    if set(call.dims()) != {len(call.shapes[0]) - 1}:
        raise Unfit("the sum is not over the last dimension")
    _contiguous(call, 0, -1, kinds[0], size)
    return INVARIANT


def _cut_result(call: WholeCall, dim: int, size: int) -> Cut:
    shape = call.results[0]
    return Cut(dim % len(shape), shape[dim] // size)


def _rows(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    _contiguous(call, 0, -2, kinds[0], size)
    _equal((1, 2), kinds, flows)
    _mask(call, kinds, size, flows, -2)
    return _cut_result(call, -2, size)


def _ring(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    for operand in range(3):
        _contiguous(call, operand, -2, kinds[operand], size)
    _mask(call, kinds, size, flows, -2)
    return _cut_result(call, -2, size)


def _documents_ring(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    for operand in range(len(kinds)):
        _contiguous(call, operand, -2 if operand < 3 else -1, kinds[operand], size)
    return _cut_result(call, -2, size)


def _heads(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    _contiguous(call, 0, -3, kinds[0], size)
    _equal((1, 2), kinds, flows)
    _mask(call, kinds, size, flows, -3)
    return _cut_result(call, -3, size)


def _mask(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool], dim: int) -> None:
    """A mask has rows and heads of its own, of which ranks have those of their queries, or one for all."""
    if len(call.shapes) < 4:
        return
    shape = call.shapes[3]
    own = len(shape) >= -dim and shape[dim] == call.shapes[0][dim] and shape[dim] != 1
    if own:
        _contiguous(call, 3, dim, kinds[3], size)
    else:
        _equal((3,), kinds, flows)


def _owned(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    _equal((0, 1, 2), kinds, flows)
    for operand in range(3, len(kinds)):
        _contiguous(call, operand, 0, kinds[operand], size)
    return PARTIAL


def _dispatched(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    first = kinds[0]
    if not isinstance(first, Cut) or first.dim == len(call.shapes[0]) - 1 or any(kind != first for kind in kinds[1:3]):
        raise Unfit("tokens, experts and weights must be cut alike along a dimension of tokens")
    for operand in range(3, len(kinds)):
        _contiguous(call, operand, 0, kinds[operand], size)
    return first


def _image(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> int:
    """The dimension of space that is cut; weights are whole, and get a part of their gradient on each rank."""
    first = kinds[0]
    if not isinstance(first, Cut) or first.dim < 2:
        raise Unfit(f"the image must be cut along a dimension of space, and is {first}")
    _equal(range(1, len(kinds)), kinds, flows)
    return _contiguous(call, 0, first.dim, first, size)


def _windows(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    dim = _image(call, kinds, size, flows)
    if not halo_fits(call, dim, size):
        raise Unfit(f"windows along dimension {dim} read more than the neighbours' rows, or do not match the shards")
    return _cut_result(call, dim, size)


def _statistics(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    if not without_running(call):
        raise Unfit("its statistics are not those of each image")
    return _cut_result(call, _image(call, kinds, size, flows), size)


def _mean(call: WholeCall, kinds: Sequence[Kind], size: int, flows: Sequence[bool]) -> Kind:
    dim = _image(call, kinds, size, flows)
    if call.op == "aten.mean" and (dim not in call.dims() or "dim" not in call.arguments):
        raise Unfit(f"the mean is not over dimension {dim}")
    if call.op != "aten.mean" and prod(call.results[0][2:]) != 1:
        raise Unfit("the mean is of more than one pixel")
    return PARTIAL


def _along(row: Callable[[WholeCall], OperationRow]) -> Callable[[WholeCall], OperationRow]:
    """The row with all dimensions of space whole."""

    def make(call: WholeCall) -> OperationRow:
        found, space = row(call), range(2, len(call.shapes[0]))
        operands = (_whole(found.operands[0], space), *found.operands[1:])
        return replace(found, operands=operands, results=tuple(_whole(dims, space) for dims in found.results), linear=())

    return make


def _whole(dims: Dims, which: Collection[int]) -> Dims:
    """The dimensions, some of which are never cut."""
    return tuple((("", prod(size for _, size in dim)),) if i in which else dim for i, dim in enumerate(dims))


def _banded(call: WholeCall) -> OperationRow:
    return attention(replace(call, arguments={**call.arguments, "is_causal": True}))


def _whole_documents(call: WholeCall) -> OperationRow:
    row = attention_documents(call)
    operands = tuple(_whole(dims, {2 if index < 3 else 1}) for index, dims in enumerate(row.operands))
    return OperationRow(operands, tuple(_whole(dims, {2}) for dims in row.results))


def _whole_heads(call: WholeCall) -> OperationRow:
    row = _banded(call)
    operands, results = (tuple(_whole(dims, {len(dims) - 3}) for dims in side) for side in (row.operands, row.results))
    return OperationRow(operands, results)


_ATTENTION = ("aten.scaled_dot_product_attention", "ap.attention")
LEMMAS = {
    each.name: each
    for each in (
        Lemma("ap.embedding_sharded", "aten.embedding", _embedding_whole, _embedding, embedding),
        Lemma("ap.cross_entropy_sharded", "ap.cross_entropy_sum", _as_given, _cross_entropy, cross_entropy_sum),
        Lemma("ap.token_log_probs_sharded", "ap.token_log_probs", _as_given, _cross_entropy, token_log_probs),
        Lemma("ap.logsumexp_sharded", "aten.logsumexp", _as_given, _logsumexp, reduction("")),
        Lemma("ap.attention_rows", "attention", _as_given, _rows, _banded),
        Lemma("ap.attention_ring", "attention", _as_given, _ring, _banded),
        Lemma("ap.attention_documents_ring", "ap.attention_documents", _as_given, _documents_ring, _whole_documents),
        Lemma("ap.attention_heads", "attention", _as_given, _heads, _whole_heads),
        Lemma("ap.moe_experts_owned", "ap.moe_experts", _as_given, _owned, moe_experts),
        Lemma("ap.moe_experts_dispatched", "ap.moe_experts", _as_given, _dispatched, moe_experts),
        Lemma("ap.moe_experts_start", "ap.moe_experts", _as_given, _dispatched, moe_experts),
        Lemma("ap.convolution_halo", "convolution", _as_given, _windows, _along(convolution)),
        Lemma("ap.transposed_convolution_halo", "transposed", _as_given, _windows, _along(convolution)),
        Lemma("ap.max_pool_halo", "max_pool", _as_given, _windows, _along(image)),
        Lemma("ap.avg_pool_halo", "avg_pool", _as_given, _windows, _along(image)),
        Lemma("ap.interpolate_halo", "interpolate", _as_given, _windows, _along(image)),
        Lemma("ap.group_norm_space", "aten.group_norm", _as_given, _statistics, _along(group_norm)),
        Lemma("ap.instance_norm_space", "aten.instance_norm", _as_given, _statistics, _along(instance_norm)),
        Lemma("ap.mean_space", "aten.mean", _as_given, _mean, reduction("", linear=True)),
        Lemma("ap.adaptive_avg_pool_space", "adaptive_avg_pool", _as_given, _mean, _along(image)),
    )
}
SAME = {
    "attention": _ATTENTION,
    "convolution": ("aten.conv1d", "aten.conv2d", "aten.conv3d"),
    "transposed": ("aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d"),
    "max_pool": ("aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d"),
    "avg_pool": ("aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d"),
    "interpolate": ("aten.upsample_linear1d", "aten.upsample_bilinear2d", "aten.upsample_trilinear3d"),
    "adaptive_avg_pool": ("aten.adaptive_avg_pool2d", "aten.adaptive_avg_pool3d"),
}
"""Operations that a lemma stands for under one name."""
