"""Ranks in one process: cut tensors by placements, run an operation per rank, put the results together. The reference for
what placements mean, forward and backward; nothing here uses the code under test except `local_parts` and `localize_args`."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from autopar.ir.dims import size_at as size_at
from autopar.ir.graph import DType, Node, Ref, Symbol
from autopar.ir.placement import Partial, Placement, Placements, Replicate, Shard, local_parts
from autopar.rules.localize import localize_args
from autopar.runtime.ops.functions import unpacked
from support.oracles import dense_attention, experts_by_loop

Coordinates = tuple[int, ...]
Locals = dict[Coordinates, Tensor]


def rank_coordinates(sizes: Sequence[int]) -> list[Coordinates]:
    return list(product(*map(range, sizes)))


def shard_axis(x: Tensor, placement: Placement, parts: int, size: int) -> list[Tensor]:
    """One axis: what each of its ranks holds of `x`. `parts` is local."""
    if isinstance(placement, Shard):
        if x.shape[placement.dim] % (parts * size):
            raise ValueError(f"{tuple(x.shape)} does not divide by {placement} over {size}")
        chunks = [piece.chunk(size, placement.dim) for piece in x.chunk(parts, placement.dim)]
        return [torch.cat([piece[rank] for piece in chunks], placement.dim) for rank in range(size)]
    if isinstance(placement, Partial):
        noise = [torch.randn(x.shape, dtype=x.dtype) for _ in range(size - 1)]
        return [*noise, x - sum(noise)] if size > 1 else [x]
    return [x] * size


def unshard_axis(pieces: Sequence[Tensor], placement: Placement, parts: int) -> Tensor:
    """The inverse of `cut`; equal copies are checked to be equal."""
    if isinstance(placement, Shard):
        chunks = [piece.chunk(parts, placement.dim) for piece in pieces]
        return torch.cat([chunk[part] for part in range(parts) for chunk in chunks], placement.dim)
    if isinstance(placement, Partial):
        return torch.stack(list(pieces)).sum(0)
    for piece in pieces[1:]:
        close(piece, pieces[0], 1e-9 if piece.dtype is torch.float64 else 1e-5)
    return pieces[0]


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    same = found.shape == expected.shape and found.dtype == expected.dtype and found.device == expected.device
    if same and torch.allclose(found, expected, tolerance, tolerance, equal_nan=True):
        return  # as assert_close finds, which takes five times as long to say nothing
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def shard(x: Tensor, placements: Placements, sizes: Sequence[int]) -> Locals:
    """What every rank holds, outermost axis first."""
    held: Locals = {(): x}
    for axis, (placement, size) in enumerate(zip(placements, sizes, strict=True)):
        parts = local_parts(placements, sizes, axis) if isinstance(placement, Shard) else 1
        held = {
            (*at, rank): piece for at, old in held.items() for rank, piece in enumerate(shard_axis(old, placement, parts, size))
        }
    return held


def assemble(held: Mapping[Coordinates, Tensor], placements: Placements, sizes: Sequence[int]) -> Tensor:
    """The whole value that the ranks hold together."""
    held = dict(held)
    for axis in reversed(range(len(sizes))):
        placement = placements[axis]
        parts = local_parts(placements, sizes, axis) if isinstance(placement, Shard) else 1
        held = {
            at: unshard_axis([held[(*at, rank)] for rank in range(sizes[axis])], placement, parts)
            for at in rank_coordinates(sizes[:axis])
        }
    return held[()]


def dual(placements: Placements) -> Placements:
    """Where the gradient is: Replicate and Partial swap, Shard and Invariant stay."""

    def one(placement: Placement) -> Placement:
        if isinstance(placement, Replicate):
            return Partial()
        return Replicate() if isinstance(placement, Partial) else placement

    return tuple(map(one, placements))


# -- running one node ------------------------------------------------------------------------------------------------


def _linear_kn(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    return x @ w if b is None else x @ w + b


def _cross_entropy_sum(logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ignore_index=ignore_index, label_smoothing=label_smoothing,
        reduction="sum",
    )  # fmt: skip


def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "halves") -> Tensor:
    half = x.shape[-1] // 2
    halves = [*range(half), *range(half)] if layout != "interleaved" else [i // 2 for i in range(2 * half)]
    cos, sin = (table if table.shape[-1] == 2 * half else table[..., halves] for table in (cos, sin))
    if layout == "interleaved to halves":
        x = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    if layout == "interleaved":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).reshape(x.shape)
    else:
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


AP: dict[str, Callable[..., Any]] = {
    "ap.linear_kn": _linear_kn,
    "ap.linear_float8_dynamic": torch.nn.functional.linear,
    "ap.attention": dense_attention.dense,
    "ap.attention_documents": dense_attention.documents,
    "ap.document_numbers": lambda ends, *_: torch.arange(len(ends) - 1).repeat_interleave(ends.diff()),
    "ap.moe_experts": experts_by_loop.every_token_through_every_expert,
    "ap.expert_capacity": experts_by_loop.capacity,
    "ap.cross_entropy_sum": _cross_entropy_sum,
    "ap.token_log_probs": lambda logits, index: logits.log_softmax(-1).gather(-1, index),
    "ap.rotary_embedding": _rotary_embedding,
    "ap.ctc_losses": lambda *given: torch.nn.functional.ctc_loss(*given[:5], reduction="none", zero_infinity=given[5]),
    "ap.constant": unpacked,
    "ap.count_valid": lambda target, ignore_index=-100: (target != ignore_index).sum().double(),
    "ap.local_mean": lambda x, dims, _: x.mean([d for d in dims if d], keepdim=True),  # of a rank with one example
    "ap.random": lambda x, kind, a, b: torch.sin(x.detach() * 1e3),  # likewise
    "ap.dropout": lambda x, p: x * (torch.sin(x.detach() * 1e3) > p) / (1 - p),  # a mask that depends on the element only
}
RENAMED = {
    "aten.histc": lambda x, *bounds: torch.histc(x.double(), *bounds).to(x.dtype),
    "aten.reshape": torch.reshape,
    "aten.split.Tensor": torch.split,
    "aten.pad": torch.nn.functional.pad,
}


def argument(arg: Any, tensors: Mapping[str, Tensor], batch: int) -> Any:
    if isinstance(arg, Ref):
        return tensors[arg.name]
    if isinstance(arg, Symbol):
        return arg.at(batch)
    if isinstance(arg, DType):
        return getattr(torch, arg.name)
    if isinstance(arg, tuple):
        return [argument(item, tensors, batch) for item in arg]
    return arg


def run_node(node: Node, tensors: Mapping[str, Tensor], batch: int) -> tuple[Any, ...]:
    """Runs one node on whole or local tensors."""
    args = [argument(arg, tensors, batch) for arg in node.args]
    kwargs = {name: argument(arg, tensors, batch) for name, arg in node.kwargs}
    function = AP.get(node.op) or RENAMED.get(node.op)
    if function is None:
        namespace, packet, *overload = node.op.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload[0] if overload else "default")
    result = function(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


class _CrossEntropy(torch.autograd.Function):
    """One rank's part of the vocabulary-parallel cross entropy; `everyone` is what the all-reduces would tell."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, everyone: list[Tensor], rank: int, ignore: int, smooth: float
    ) -> Tensor:
        whole = torch.cat(everyone, -1)
        size, local = whole.shape[-1], logits.shape[-1]
        log_normaliser = whole.logsumexp(-1)
        valid = target != ignore
        at_target = whole.gather(-1, target.clamp(0).unsqueeze(-1)).squeeze(-1)
        losses = log_normaliser - (1 - smooth) * at_target - smooth / size * whole.sum(-1)
        mine = torch.nn.functional.one_hot(target.clamp(0), size)[..., rank * local : (rank + 1) * local].to(logits.dtype)
        ctx.grad = ((logits - log_normaliser.unsqueeze(-1)).exp() - (1 - smooth) * mine - smooth / size) * valid.unsqueeze(-1)
        return losses * valid

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grad * grad.unsqueeze(-1), None, None, None, None, None


def _embedding_sharded(group: list[list[Any]]) -> list[Tensor]:
    out = []
    for rank, (weight, ids, *rest) in enumerate(group):
        rows, padding = weight.shape[0], rest[0] if rest else -1
        local = ids - rank * rows
        here = (local >= 0) & (local < rows)
        found = torch.nn.functional.embedding(local.clamp(0, rows - 1), weight)
        found = torch.where((ids == padding).unsqueeze(-1), found.detach(), found)
        out.append(found * here.unsqueeze(-1))
    return out


def _cross_entropy_sharded(group: list[list[Any]]) -> list[Tensor]:
    everyone = [args[0].detach() for args in group]
    return [
        _CrossEntropy.apply(args[0], args[1], everyone, rank, *(args[2:] or [-100]), *([0.0] if len(args) < 4 else [])).sum()
        for rank, args in enumerate(group)
    ]


def _token_log_probs_sharded(group: list[list[Any]]) -> list[Tensor]:
    everyone = [logits.detach() for logits, _ in group]
    losses = [_CrossEntropy.apply(logits, index[..., 0], everyone, rank, -1, 0.0) for rank, (logits, index) in enumerate(group)]
    return [-each.unsqueeze(-1) for each in losses]


class _OwnGradient(torch.autograd.Function):
    """The result of all shards, whose gradient, equal on all ranks, comes to this rank's alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, result: Tensor) -> Tensor:
        ctx.save_for_backward(x, result)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, result = ctx.saved_tensors
        return grad * (x - result).exp(), None


def _logsumexp_sharded(group: list[list[Any]]) -> list[Tensor]:
    result = torch.cat([args[0].detach() for args in group], -1).logsumexp(-1, keepdim=True)
    found = [_OwnGradient.apply(args[0], result) for args in group]
    return [each if len(args) > 2 and args[2] else each.squeeze(-1) for each, args in zip(found, group, strict=True)]


GROUPED: dict[str, Callable[..., list[Tensor]]] = {
    "ap.embedding_sharded": _embedding_sharded,
    "ap.cross_entropy_sharded": _cross_entropy_sharded,
    "ap.token_log_probs_sharded": _token_log_probs_sharded,
    "ap.logsumexp_sharded": _logsumexp_sharded,
    "ap.attention_ring": dense_attention.ring,
    "ap.attention_documents_ring": dense_attention.documents_ring,
    "ap.attention_rows": dense_attention.rows,
    "ap.attention_heads": dense_attention.heads,
    "ap.moe_experts_owned": experts_by_loop.owned,
    "ap.moe_experts_dispatched": experts_by_loop.dispatched,
}
"""Named functions, run for all ranks of their axis at once."""
LABELS = {
    "ap.embedding_sharded": "v",
    "ap.cross_entropy_sharded": "v",
    "ap.token_log_probs_sharded": "v",
    "ap.logsumexp_sharded": "v",
    "ap.attention_ring": "s t",
    "ap.attention_documents_ring": "s t",
    "ap.attention_rows": "s",
    "ap.attention_heads": "h",
    "ap.moe_experts_owned": "e",
    "ap.moe_experts_dispatched": "e batch",
}
"""What a plan's label says on the axis of a named function, or how it begins."""


def run_ranks(
    node: Node, results: Sequence[Placements], sizes: Sequence[int], held: Mapping[str, Locals], batch: int,
    function: str = "", function_axis: int = 0,
) -> dict[Coordinates, tuple[Any, ...]]:  # fmt: skip
    """Runs a node on every rank, sizes in arguments made local. `held` are the operands' local tensors."""
    everyone = rank_coordinates(sizes)
    if function:
        groups: dict[Coordinates, list[Coordinates]] = {}
        for at in everyone:
            groups.setdefault(at[:function_axis] + at[function_axis + 1 :], []).append(at)
        out: dict[Coordinates, tuple[Any, ...]] = {}
        for members in groups.values():
            args = [
                [argument(arg, {name: local[at] for name, local in held.items()}, batch) for arg in node.args] for at in members
            ]
            with_names = node.kwargs if function.startswith("ap.attention") else ()
            named = {name: argument(arg, {}, batch) for name, arg in with_names}
            out.update((at, (result,)) for at, result in zip(members, GROUPED[function](args, **named), strict=True))
        return out
    shapes = [tuple(size_at(dim, batch) for dim in value.shape) for value in node.outputs]
    for index, placements in enumerate(results):
        for placement, size in zip(placements, sizes, strict=True):
            if isinstance(placement, Shard):
                shape = list(shapes[index])
                shape[placement.dim] //= size
                shapes[index] = tuple(shape)
    local = localize_args(node, shapes)
    return {at: run_node(local, {name: tensors[at] for name, tensors in held.items()}, batch) for at in everyone}


def assert_sharded_equals_whole(
    node: Node, tensors: Mapping[str, Tensor], operands: Sequence[Placements], results: Sequence[Placements],
    sizes: Sequence[int], function: str = "", function_axis: int = 0, batch: int = 8, constants: Container[str] = (),
) -> None:  # fmt: skip
    """Asserts that the node on shards equals the node on whole tensors, forward and gradients.

    The same value as two operands is treated as two values; those in `constants` have no gradient. A gradient is seeded into
    differentiable outputs only.
    """
    names = list(node.operands())
    tolerance = 1e-5 if any(x.dtype is torch.float32 for x in tensors.values()) else 1e-9
    leaves = {f"{name}#{i}": tensors[name].clone() for i, name in enumerate(names)}
    node = rename(node)
    floating = {
        leaf for (leaf, x), name in zip(leaves.items(), names, strict=True)
        if x.is_floating_point() and not node.no_grad and name not in constants
    }  # fmt: skip
    for name in floating:
        leaves[name].requires_grad_()
    whole = run_node(node, leaves, batch)
    with torch.no_grad():
        held = {name: shard(x, where, sizes) for (name, x), where in zip(leaves.items(), operands, strict=True)}
    held = {
        name: {at: x.detach().clone().requires_grad_(name in floating) for at, x in local.items()} for name, local in held.items()
    }
    parts = run_ranks(node, results, sizes, held, batch, function, function_axis)
    for index, expected in enumerate(whole):
        found = assemble({at: result[index].detach() for at, result in parts.items()}, results[index], sizes)
        close(found, expected.detach(), tolerance)
    wanted = [
        index
        for index, (x, value) in enumerate(zip(whole, node.outputs, strict=True))
        if x.requires_grad and value.differentiable
    ]
    if not wanted:
        return
    seeds = [torch.randn_like(whole[i]) for i in wanted]
    expected_grads = torch.autograd.grad(
        [whole[i] for i in wanted], [leaves[n] for n in leaves if n in floating], seeds, allow_unused=True
    )
    local_seeds = [shard(seed, dual(results[i]), sizes) for i, seed in zip(wanted, seeds, strict=True)]
    order = [name for name in leaves if name in floating]
    grads: dict[str, Locals] = {name: {} for name in order}
    everyone = rank_coordinates(sizes)  # at once: what one rank gets from another has a gradient there
    inputs = [(name, at) for name in order for at in everyone]
    found_grads = torch.autograd.grad(
        [parts[at][i] for at in everyone for i in wanted],
        [held[name][at] for name, at in inputs],
        [seed[at] for at in everyone for seed in local_seeds],
        allow_unused=True,
    )
    for (name, at), grad in zip(inputs, found_grads, strict=True):
        grads[name][at] = torch.zeros_like(held[name][at]) if grad is None else grad
    placed = dict(zip(leaves, operands, strict=True))
    for name, grad in zip(order, expected_grads, strict=True):
        found = assemble(grads[name], dual(placed[name]), sizes)
        close(found, torch.zeros_like(leaves[name]) if grad is None else grad, tolerance)


def rename(node: Node) -> Node:
    """The node with every operand under a name of its own: ``x#0``, ``x#1``."""
    counter = iter(range(10**6))

    def one(arg: Any) -> Any:
        if isinstance(arg, Ref):
            return Ref(f"{arg.name}#{next(counter)}")
        return tuple(map(one, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(one, node.args))
    kwargs = tuple((name, one(arg)) for name, arg in node.kwargs)
    return Node(node.op, args, kwargs, node.outputs, no_grad=node.no_grad)
