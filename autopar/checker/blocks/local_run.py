"""What one rank's tensors are: operations run on the meta device, which tells shapes, dtypes, whether gradients flow, what
autograd saves, and what is allocated on the way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.checker.reader import Applied, AxisName, Fixed, PlacedTensor
from autopar.checker.rows.operation_call import DTypeName, tensors_of


def meta_tensor(shape: Sequence[int], dtype: str, gradient: bool = False) -> Tensor:
    made = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
    return made.requires_grad_() if gradient and made.dtype.is_floating_point else made


def _plain(value: Any, leaves: Mapping[int, Tensor]) -> Any:
    if isinstance(value, PlacedTensor):
        return leaves.get(id(value.local), value.local)
    if isinstance(value, DTypeName):
        return getattr(torch, value.name)
    if isinstance(value, tuple):
        return [_plain(each, leaves) for each in value]
    return None if isinstance(value, (Fixed, AxisName)) else value


def run(
    applied: Applied, fused: bool = False, ranks: int = 1, leaves: Mapping[int, Tensor] = MappingProxyType({})
) -> tuple[Tensor, ...] | None:
    """The results of an operation on one rank; None where a lemma or the captured graph tells them. Raises what torch raises.
    `fused`: attention as kernels compute it, which save no matrix. `ranks`: of the axis of experts. `leaves`: tensors to take for
    others, by id."""
    namespace, name, *overload = applied.op.split(".")
    args, kwargs = [_plain(each, leaves) for each in applied.args], {k: _plain(v, leaves) for k, v in applied.kwargs.items()}
    kwargs.pop("sharded_axes", None)
    if namespace == "ap":
        kwargs.pop("axis", None)
        function = STAND_INS.get(name)
        kwargs |= {"ranks": ranks} if name == "moe_experts_owned" else {}
        return None if function is None else (function(*args, **kwargs),)
    if not any(isinstance(each, PlacedTensor) for each in tensors_of((*applied.args, applied.kwargs), PlacedTensor)):
        kwargs["device"] = "meta"
    packet = getattr(getattr(torch.ops, namespace), name)
    packet = getattr(packet, overload[0]) if overload else packet
    if fused and name == "scaled_dot_product_attention" and not kwargs.get("dropout_p") and len(args) < 5:
        return (_attention(*args[:4], **kwargs),)
    result = packet(*args, **kwargs)
    found = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    # a view that is made under no_grad of a leaf says that it requires a gradient, and has none
    return found if torch.is_grad_enabled() else tuple(x.detach() for x in found)


# -- functions of the runtime: what shapes, dtypes and saved tensors theirs have


class _Fused(torch.autograd.Function):
    """A kernel that saves its operands, its result and `extra` bytes, and works in `forward_bytes` and `backward_bytes`."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], sizes: tuple[int, int, int], *operands: Tensor | None) -> Tensor:
        extra, working, ctx.working = sizes
        ctx.operands = operands
        first = next(each for each in operands if each is not None)
        result = first.new_empty(tuple(shape))
        ctx.save_for_backward(*operands, result, _bytes(extra))
        _bytes(working)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        working = _bytes(ctx.working)
        out = [torch.empty_like(x) if x is not None and x.is_floating_point() else None for x in ctx.operands]
        del working
        return None, None, *out


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def _size(x: Tensor | None) -> int:
    return 0 if x is None else x.numel() * x.element_size()


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """A fused kernel: one float32 for each query beside its result; gradients are sums in float32. Some repeat the key heads."""
    heads = q.shape[-3] // max(1, k.shape[-3]) if q.dim() > 2 else 1
    repeated = heads * (_size(k) + _size(v)) if heads > 1 else 0
    rows = 4 * q.numel() // max(1, q.shape[-1])
    floats = 4 * (q.numel() + heads * (k.numel() + v.numel()))
    return _Fused.apply((*q.shape[:-1], v.shape[-1]), (rows + repeated, floats, 2 * floats + 2 * repeated), q, k, v, mask)  # type: ignore[no-any-return,no-untyped-call]


def _experts(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None = None,
    down_bias: Tensor | None = None, *_: Any, ranks: int = 1, **more: Any,
) -> Tensor:  # fmt: skip
    """Copies of tokens for the experts of one of `ranks`, equally many for each: their indices, the products and the gate."""
    turned = "transposed" in str(more.get("layout", ""))
    wide, inner, width = (up.shape[2], down.shape[1], x.shape[-1]) if turned else (up.shape[1], down.shape[2], x.shape[-1])
    copies = -(-experts.numel() // ranks)
    unit = copies * x.element_size()
    extra = unit * (wide + width) + 2 * 8 * copies
    working = unit * (width + max(width, 2 * inner))
    sizes = extra, working, unit * (4 * inner + 2 * wide + 2 * width)
    return _Fused.apply(x.shape, sizes, x, weights, up, down, up_bias, down_bias)  # type: ignore[no-any-return,no-untyped-call]


def _looked_up(ids: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    elsewhere = ids < 0
    return F.embedding(ids.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere.unsqueeze(-1), 0)


def _full_precision(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _losses(logits: Tensor, target: Tensor, *_: Any, **__: Any) -> Tensor:
    torch.broadcast_shapes(logits.shape[:-1], target.shape)
    return F.log_softmax(_full_precision(logits), -1).select(-1, 0).sum()


def _log_probs(logits: Tensor, index: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.log_softmax(_full_precision(logits), -1).narrow(-1, 0, 1).expand(index.shape).to(logits.dtype)


class _Gradients(torch.autograd.Function):
    """A loss that saves the gradients of its operands, and of a chunk of tokens holds the logits and their gradient, wide and
    narrow."""

    @staticmethod
    def forward(ctx: Any, chunk: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(None if each is None else torch.empty_like(each) for each in (x, weight, bias)))
        rows, size = min(chunk, x.numel() // max(1, x.shape[-1])), x.element_size()
        _bytes(rows * (weight.shape[0] * (2 * size + 4) + size * x.shape[-1]))
        return _full_precision(x.new_empty(()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.saved_tensors


def _linear_losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *options: Any) -> Tensor:
    torch.broadcast_shapes(x.shape[:-1], target.shape)
    return _Gradients.apply(options[2], x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


def _linear_kn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = torch.matmul(x, weight)
    return out if bias is None else out + bias


def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, layout: str = "") -> Tensor:
    first, second = x.chunk(2, -1)
    (c, d), (s, t) = (table.chunk(2, -1) if table.shape[-1] == x.shape[-1] else (table, table) for table in (cos, sin))
    return torch.cat((first * c - second * s, second * d + first * t), -1)


def _linear_float8(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias) + 0.0 * (x.sum() + weight.sum())


EXPERTS = ("moe_experts", "moe_experts_owned", "moe_experts_dispatched", "moe_experts_start")
_ATTENTION = ("attention", *(f"attention_{kind}" for kind in ("documents", "documents_ring", "rows", "ring", "heads")))
STAND_INS: Mapping[str, Callable[..., Tensor]] = {
    "linear_kn": _linear_kn,
    "rotary_embedding": _rotary_embedding,
    "linear_float8_dynamic": _linear_float8,
    "embedding_sharded": _looked_up,
    "cross_entropy_sum": _losses,
    "cross_entropy_sharded": _losses,
    **dict.fromkeys(("token_log_probs", "token_log_probs_sharded"), _log_probs),
    "logsumexp_sharded": lambda x, _, keepdim=False, **__: x.logsumexp(-1, keepdim),
    "linear_cross_entropy_sum": _linear_losses,
    "linear_cross_entropy_sharded": _linear_losses,
    "count_valid": lambda target, *_, **__: (target != 0).sum().float(),
    "dropout": lambda x, p=0.5, *_, **__: F.dropout(x, p),
    "random": lambda x, *_, dtype, **__: torch.empty(x.shape, dtype=dtype, device="meta"),
    "constant": lambda shape, _, dtype, *__: torch.empty(tuple(shape), dtype=dtype, device="meta"),
    "local_mean": lambda x, dims, *_: x.mean([d for d in dims if d], keepdim=True).expand(
        [1 if d in dims and d else n for d, n in enumerate(x.shape)]),
    "expert_capacity": lambda x, *_, **__: torch.empty_like(x.detach()),
    **dict.fromkeys(_ATTENTION, _attention),
    **dict.fromkeys(EXPERTS, _experts),
}  # fmt: skip
"""Functions of tensors whose results have the shapes and dtypes of the runtime's, and save as much for their backward or more."""


# -- memory


class _Live(TorchDispatchMode):
    """Bytes of live storages that operations allocate while it is on, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is not None and storage._cdata not in self.seen | before:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes()).atexit = False
        self.most = max(self.most, self.now)
        return result

    def _drop(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@dataclass(slots=True)
class Observed:
    """The memory of one operation on a rank: the storages that it saves by key, the bytes that it saves beside operands and
    results, and the most that forward and backward allocate, results and gradients of operands included."""

    saved: dict[int, int] = field(default_factory=dict)
    extra: int = 0
    forward: int = 0
    backward: int = 0


def storage_of(x: Tensor) -> tuple[int, int]:
    """Key and bytes of the storage of a tensor."""
    storage = x.untyped_storage()
    return storage._cdata, storage.nbytes()


def observe(applied: Applied, results: Sequence[Tensor], ranks: int = 1) -> Observed:
    """Run an operation again, forward and backward. `results` are those of its first run."""
    out, kept = Observed(), list[Tensor]()

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    live = _Live()
    operands = [each.local for each in tensors_of((*applied.args, applied.kwargs), PlacedTensor)]
    leaves = {id(x): x.detach().requires_grad_(x.requires_grad) for x in operands}  # no history beyond this line
    own = {storage_of(x)[0] for x in operands}
    with saved_tensors_hooks(pack, lambda x: x), live:
        found = run(applied, fused=True, ranks=ranks, leaves=leaves)
        out.forward = live.most
        if found is None:  # nobody can run it here: as much again as all it reads and makes
            total = sum(map(_size, (*operands, *results)))
            saved = dict(storage_of(x) for x in (*operands, *results))
            return Observed(saved, total, 2 * total, 2 * total)
        names = {storage_of(new)[0]: storage_of(old)[0] for new, old in zip(found, results, strict=True)}
        extras = dict[int, int]()
        for each in kept:
            key, size = storage_of(each)
            if key in own or key in names:
                out.saved[names.get(key, key)] = size
            else:
                extras[key] = size
        out.extra = sum(extras.values())
        flowing = [x for x in found if x.requires_grad]
        wanted = [x for x in leaves.values() if x.requires_grad]
        if flowing and wanted:
            gradients = [torch.empty_like(x, requires_grad=False) for x in flowing]
            live.most = live.now
            before = live.now - sum(map(_size, gradients))
            torch.autograd.grad(flowing, wanted, gradients, allow_unused=True)
            out.backward = live.most - before
    return out
