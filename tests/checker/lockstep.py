"""Runs the text of a program on all ranks of its mesh at once, in one process and one autograd graph: every tensor is one for
each rank, and a collective mixes them. Conversions are those of the runtime's table; ranks compute with torch. No pipelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from support.oracles import dense_attention
from support.oracles.simulate_ranks import Coordinates, assemble, shard
from torch import Tensor

from autopar.ir.placement import parse_placement
from autopar.runtime.comm.conversions import AxisOperation, apply_locally, join_shards, parse_conversion, split_shards
from autopar.runtime.device.axis import AxisHandle
from autopar.runtime.module import ParameterSpec
from autopar.runtime.ops import experts, functions, losses, mixtures

REDUCTIONS: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class OnRanks:
    """One tensor for each rank."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_each(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.parts[0], name)
        if not callable(found):
            return found if not isinstance(found, Tensor) else OnRanks([getattr(each, name) for each in self.parts])
        return lambda *args, **kwargs: on_each(lambda x, *a, **k: getattr(x, name)(*a, **k), (self, *args), kwargs)

    def __getitem__(self, index: Any) -> Any:
        return on_each(lambda x, i: x[i], (self, index), {})


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: on_each(lambda x, *rest: getattr(x, name)(*rest), (self, *others), {})


for _name in "add sub mul truediv pow mod eq ne lt le gt ge and or xor neg radd rsub rmul rtruediv rpow".split():  # noqa: SIM905
    setattr(OnRanks, f"__{_name}__", _operator(f"__{_name}__"))
OnRanks.__hash__ = None  # type: ignore[assignment]


def _ranks(value: Any) -> Iterator[int]:
    if isinstance(value, OnRanks):
        yield len(value.parts)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _ranks(each)
    elif isinstance(value, Mapping):
        yield from _ranks(list(value.values()))


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, OnRanks):
        return value.parts[rank]
    if isinstance(value, (tuple, list)):
        return type(value)(_of_rank(each, rank) for each in value)
    return {key: _of_rank(each, rank) for key, each in value.items()} if isinstance(value, dict) else value


def on_each(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The function of every rank's tensors."""
    count = next(_ranks((args, kwargs)), 0)
    results = [function(*_of_rank(args, rank), **_of_rank(kwargs, rank)) for rank in range(count)]
    if isinstance(results[0], (tuple, list)):
        return tuple(OnRanks(column) for column in zip(*results, strict=True))
    return OnRanks(results)


@dataclass(frozen=True)
class LockstepAxis:
    """A mesh axis: `groups` are the numbers of the ranks that differ on it alone."""

    name: str
    size: int
    groups: tuple[tuple[int, ...], ...]


def _operate(operation: AxisOperation, pieces: Sequence[Tensor]) -> list[Tensor]:
    size = len(pieces)
    if operation.kind in ("gather", "all_to_all"):
        whole = join_shards(torch.stack(list(pieces)), operation.dim, operation.parts)
        return [whole] * size if operation.kind == "gather" else list(split_shards(whole, operation.to, operation.to_parts, size))
    if operation.kind in ("all_reduce", "reduce_scatter"):
        stacked = torch.stack(list(pieces))
        whole = REDUCTIONS[operation.op](stacked, 0)
        return (
            [whole] * size if operation.kind == "all_reduce" else list(split_shards(whole, operation.dim, operation.parts, size))
        )
    return [apply_locally(operation, piece, size, rank) for rank, piece in enumerate(pieces)]


class _Conversion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, text: str, *pieces: Tensor) -> Any:
        ctx.text = text
        return tuple(each.clone() for each in _operate(parse_conversion(text)[0], pieces))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *(each.clone() for each in _operate(parse_conversion(ctx.text)[1], grads))


def convert(x: OnRanks, axis: LockstepAxis, text: str) -> OnRanks:
    """A conversion, in all groups of the axis."""
    if axis.size == 1:
        return x
    out: list[Any] = [None] * len(x.parts)
    for group in axis.groups:
        for rank, piece in zip(group, _Conversion.apply(text, *(x.parts[rank] for rank in group)), strict=True):
            out[rank] = piece
    return OnRanks(out)


def _in_groups(axis: LockstepAxis, run: Callable[[list[Any]], Sequence[Any]], values: Sequence[Any]) -> OnRanks:
    out: list[Any] = [None] * prod((axis.size, len(axis.groups)))
    for group in axis.groups:
        for rank, piece in zip(group, run([_of_rank(tuple(values), rank) for rank in group]), strict=True):
            out[rank] = piece
    return OnRanks(out)


def _with_places(function: Callable[..., Tensor], axis: LockstepAxis, values: Sequence[Any]) -> OnRanks:
    """A function that asks for the place of its rank on the axis."""
    places = [AxisHandle("", axis.size, rank) for rank in range(axis.size)]
    return _in_groups(axis, lambda group: [function(place, *each) for each, place in zip(group, places, strict=True)], values)


def _embedding_sharded(ids: Any, weight: Any, axis: LockstepAxis, padding_idx: int | None = None) -> OnRanks:
    return _with_places(lambda place, *own: functions.embedding_sharded(*own, place, padding_idx), axis, (ids, weight))


def _of_whole(function: Callable[..., Tensor], axis: LockstepAxis, logits: Any, *others: Any) -> OnRanks:
    """A function of all logits of the group; each rank gets the gradient of its own, from a result that is equal on all."""

    def run(group: list[Any]) -> list[Tensor]:
        found = function(torch.cat([each[0] for each in group], -1), *group[0][1:])
        return list(_Conversion.apply("P -> I", *([found / axis.size] * axis.size)))

    return _in_groups(axis, run, (logits, *others))


def _cross_entropy_sharded(logits: Any, target: Any, ignore: int, smoothing: float, axis: LockstepAxis) -> OnRanks:
    return _of_whole(lambda whole, own: losses.cross_entropy_sum(whole, own, ignore, smoothing), axis, logits, target)


def _logsumexp_sharded(x: Any, dims: Any, keepdim: bool = False, *, axis: LockstepAxis) -> OnRanks:
    return _of_whole(lambda whole: whole.logsumexp(-1, keepdim), axis, x)


def _token_log_probs_sharded(logits: Any, index: Any, axis: LockstepAxis) -> OnRanks:
    return _of_whole(losses.token_log_probs, axis, logits, index)


def _attention(dim: int, keys: bool) -> Callable[..., OnRanks]:
    """Attention whose queries are sharded along `dim`, and with `keys` the keys and values too: dense on the whole, of which each
    rank has its part."""

    def attend(q: Any, k: Any, v: Any, *rest: Any, axis: LockstepAxis, **options: Any) -> OnRanks:
        def run(group: list[Any]) -> list[Tensor]:
            whole = torch.cat([each[0] for each in group], dim)
            every = [torch.cat([each[i] for each in group], dim) for i in (1, 2)]
            out = []
            for rank, (_, own_k, own_v, mask, *more) in enumerate(group):
                masks = [each[3] for each in group]
                cut_mask = mask is not None and mask.dim() >= -dim and mask.shape[dim] == group[0][0].shape[dim] != 1
                both = every if keys else (own_k, own_v)
                found = dense_attention.dense(whole, *both, torch.cat(masks, dim) if cut_mask else mask, *more, **options)
                out.append(found.chunk(len(group), dim)[rank])
            return out

        rest = rest or (options.pop("attn_mask", None),)
        options |= {"causal": options.pop("is_causal")} if "is_causal" in options else {}
        return _in_groups(axis, run, (q, k, v, *rest))

    return attend


def _owned(*args: Any, axis: LockstepAxis, **options: Any) -> OnRanks:
    """Each rank computes the copies of its own experts."""
    return _with_places(lambda place, *own: mixtures.moe_experts_owned(*own, axis=place, **options), axis, args)


def _dispatched(x: Any, ids: Any, weights: Any, *matrices: Any, axis: LockstepAxis, **options: Any) -> OnRanks:
    """Every rank's tokens through the experts of all."""

    def run(group: list[Any]) -> list[Tensor]:
        whole = [None if m is None else torch.cat([each[3 + i] for each in group]) for i, m in enumerate(matrices)]
        return [mixtures.moe_experts(*each[:3], *whole, **options) for each in group]

    return _in_groups(axis, run, (x, ids, weights, *matrices))


def _convert_many(xs: Sequence[OnRanks], axis: LockstepAxis, text: str) -> tuple[OnRanks, ...]:
    return tuple(convert(x, axis, text) for x in xs)


def _each(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: on_each(function, args, kwargs)


COLLECTIVES = SimpleNamespace(
    convert=convert, start=convert, wait=lambda x: x, convert_many=_convert_many, embedding_sharded=_embedding_sharded,
    cross_entropy_sharded=_cross_entropy_sharded, linear_kn=_each(functions.linear_kn),
    cross_entropy_sum=_each(losses.cross_entropy_sum), count_valid=_each(functions.count_valid),
    attention_ring=_attention(-2, True), attention_rows=_attention(-2, False), attention_heads=_attention(-3, False),
    moe_experts_owned=_owned, moe_experts_dispatched=_dispatched, moe_experts_start=_dispatched, moe_experts_wait=lambda x: x,
    expert_capacity=_each(experts.expert_capacity), dropout=lambda x, *_: x,
    attention=_each(dense_attention.dense), moe_experts=_each(mixtures.moe_experts), histogram=_each(functions.histogram),
    rotary_embedding=_each(functions.rotary_embedding), token_log_probs=_each(losses.token_log_probs),
    token_log_probs_sharded=_token_log_probs_sharded, logsumexp_sharded=_logsumexp_sharded,
)  # fmt: skip
FACTORIES = ("arange", "zeros", "ones", "full", "scalar_tensor", "empty", "eye", "linspace")


class _Torch:
    """torch, whose factories make one tensor for each rank."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name in FACTORIES:
            return lambda *args, **kwargs: OnRanks([found(*args, **kwargs)] * self.ranks)
        return _Ops(found) if name == "ops" else found


class _Ops:
    """``torch.ops.aten.name.overload`` on tensors of all ranks."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return _Ops(getattr(self.inner, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return on_each(self.inner, args, kwargs)


def coordinates(sizes: Sequence[int]) -> list[Coordinates]:
    return list(product(*map(range, sizes)))


def run_in_lockstep(
    text: str, state: Mapping[str, Tensor], batch: Mapping[str, Tensor], data_axis: str = "dp"
) -> tuple[list[float], dict[str, list[Tensor]]]:
    """The loss of every rank, and for each parameter its whole gradient, as the groups of ranks that hold copies have it (they
    must be equal). Raises whatever a rank raises."""
    source = re.sub(r"^(import|from) .*$", "", text, flags=re.M)
    match = re.search(r"mesh_axes = (\{.*\})", text)
    assert match is not None
    sizes: dict[str, int] = eval(match[1])  # noqa: S307 (a text of our own)
    ranks = coordinates(tuple(sizes.values()))
    number = {at: index for index, at in enumerate(ranks)}
    axes = {}
    for index, (name, size) in enumerate(sizes.items()):
        firsts = [at for at in ranks if at[index] == 0]
        groups = tuple(tuple(number[(*at[:index], i, *at[index + 1 :])] for i in range(size)) for at in firsts)
        axes[name] = LockstepAxis(name, size, groups)
    mesh = SimpleNamespace(device="cpu", host_memory=None, **axes)
    leaves: dict[str, tuple[OnRanks, ParameterSpec]] = {}

    def placements(places: Mapping[str, str]) -> tuple[Any, ...]:
        return tuple(parse_placement(places.get(name, "R")) for name in sizes)

    def cut(x: Tensor, places: Mapping[str, str]) -> OnRanks:
        held = shard(x, placements(places), tuple(sizes.values()))
        return OnRanks([held[at] for at in ranks])

    class Block:
        specs: tuple[ParameterSpec, ...] = ()
        training = False

        def __init__(self, mesh: Any, prefix: str, names: Mapping[str, str] | None = None) -> None:
            self.mesh = mesh
            for spec in self.specs:
                name = (names or {}).get(spec.path, f"{prefix}.{spec.path}" if prefix else spec.path)
                if name not in leaves:
                    parts = cut(state[name], spec.placements)
                    flows = spec.trainable and not spec.buffer
                    leaves[name] = OnRanks([each.detach().clone().requires_grad_(flows) for each in parts.parts]), spec
                setattr(self, spec.attribute, leaves[name][0])

        def __call__(self, *args: Any) -> Any:
            return self.forward(*args)  # type: ignore[attr-defined]

    class Whole:
        def __init__(self, mesh: Any) -> None:
            self.mesh = mesh

    class Recompute:
        def __init__(self, _: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __call__(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        offload = partition = staticmethod(lambda *_: None)

    names = {
        "torch": _Torch(len(ranks)), "F": F, "C": COLLECTIVES, "nn": SimpleNamespace(ModuleList=list), "BlockModule": Block,
        "ParameterSpec": ParameterSpec, "Base": Whole, "Recompute": Recompute, "Tensor": Tensor,
    }  # fmt: skip
    exec(source, names)  # noqa: S102
    kind = names["Program"]
    program = kind(mesh)  # type: ignore[operator]
    parts = getattr(kind, "micro_batches", 1)
    placed = getattr(kind, "input_placements", {})
    local = {name: cut(x, placed.get(name, {})) for name, x in batch.items()}
    micro = [
        {name: OnRanks([each.chunk(parts)[m] for each in x.parts]) if parts > 1 else x for name, x in local.items()}
        for m in range(parts)
    ]
    ops: dict[str, str] = getattr(kind, "totals", {})
    counted = [program.count(**each) for each in micro] if ops else []
    totals = {
        name: OnRanks([REDUCTIONS[op](torch.stack([each[name].parts[r] for each in counted]), 0) for r in range(len(ranks))])
        for name, op in ops.items()
    }
    losses = [0.0] * len(ranks)
    for each in micro:
        result = program.forward(**each, **totals)
        loss = result[0] if isinstance(result, tuple) else result
        torch.autograd.backward(loss.parts, [torch.ones_like(x) for x in loss.parts])
        losses = [a + x.item() for a, x in zip(losses, loss.parts, strict=True)]
    trained = {name: each for name, each in leaves.items() if each[1].trainable and not each[1].buffer}
    gradients = {name: _gradients(x, placements(spec.placements), sizes, data_axis, ranks) for name, (x, spec) in trained.items()}
    return losses, gradients


def _gradients(x: OnRanks, placed: Any, sizes: Mapping[str, int], data_axis: str, ranks: Sequence[Coordinates]) -> list[Tensor]:
    """Whole gradients: summed over data ranks, and one for each way to choose a rank of every axis that has copies."""
    index = list(sizes).index(data_axis) if data_axis in sizes else None
    total: dict[Coordinates, Tensor] = {}
    for at, part in zip(ranks, x.parts, strict=True):
        key = at if index is None else (*at[:index], 0, *at[index + 1 :])
        grad = torch.zeros_like(part) if part.grad is None else part.grad
        total[key] = total[key] + grad if key in total else grad
    copies = [
        range(size) if str(place) == "R" and i != index else [None]
        for i, (size, place) in enumerate(zip(sizes.values(), placed, strict=True))
    ]
    out = []
    for chosen in product(*copies):
        held = {}
        for at in ranks:
            key = tuple((0 if i == index else at[i] if c is None else c) for i, c in enumerate(chosen))
            held[at] = total[key]
        out.append(assemble(held, placed, tuple(sizes.values())))
    return out
