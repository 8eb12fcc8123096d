"""Modules parallel by hand, as Megatron's are: collectives within functions of autograd, on groups of a mesh ``dp x tp``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

MESH = {"dp": 2, "tp": 2}
WIDTH, TOKENS, EXAMPLES, VOCABULARY = 8, 4, 2, 12
"""What a rank has of the batch; the rest is of the whole model."""
Made = tuple[nn.Module, dict[str, Tensor], dict[str, Any]]


def groups() -> tuple[Any, Any]:
    """The groups of this rank over which gradients are averaged, and over which layers are cut."""
    rank, own = dist.get_rank(), []
    for members in ([[0, 2], [1, 3]], [[0, 1], [2, 3]]):
        made = [dist.new_group(each) for each in members]
        own.append(next(group for group, each in zip(made, members, strict=True) if rank in each))
    return own[0], own[1]


class Copy(torch.autograd.Function):
    """The same values on all ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Reduce(torch.autograd.Function):
    """The sum over ranks; the gradient is that of all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class ReduceTwice(torch.autograd.Function):
    """As the all-reduce that autograd differentiates by itself: its backward sums once more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return Reduce.forward(ctx, x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Copy.backward(ctx, gradient)


class Split(torch.autograd.Function):
    """The part of the last dimension that is this rank's; gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.chunk(dist.get_world_size(group), -1)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts, -1), None


class Gather(torch.autograd.Function):
    """All parts of the last dimension; of the gradient this rank's part, which is the whole gradient only where all have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Split.forward(ctx, gradient, ctx.group), None


class GatherTokens(torch.autograd.Function):
    """All tokens, of which each rank has some; gradients are summed, and each rank keeps those of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ReduceTokens.forward(ctx, gradient, ctx.group), None


class ReduceTokens(torch.autograd.Function):
    """The sum over ranks, of which each rank keeps its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return GatherTokens.forward(ctx, gradient, ctx.group), None


class Column(nn.Module):
    """A product of which each rank has columns of the result."""

    def __init__(self, inside: int, outside: int, group: Any, enter: Any = Copy) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside // 2, inside))
        self.bias = nn.Parameter(torch.randn(outside // 2))
        self.group, self.enter = group, enter

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.enter is None else self.enter.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """A product of parts of both operands, which is summed; the bias is added once."""

    def __init__(self, inside: int, outside: int, group: Any, leave: Any = Reduce) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outside, inside // 2))
        self.bias = nn.Parameter(torch.randn(outside))
        self.group, self.leave = group, leave

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        return (x if self.leave is None else self.leave.apply(x, self.group)) + self.bias


PLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "*up.weight": {"tp": "S(0)"}, "*up.bias": {"tp": "S(0)"}, "*down.weight": {"tp": "S(1)"}, "*qkv.weight": {"tp": "S(0)"},
    "*qkv.bias": {"tp": "S(0)"}, "embedding.weight": {"tp": "S(0)"},
}  # fmt: skip


class Mlp(nn.Module):
    def __init__(self, group: Any, enter: Any = Copy, leave: Any = Reduce) -> None:
        super().__init__()
        self.up, self.down = Column(WIDTH, 4 * WIDTH, group, enter), Row(4 * WIDTH, WIDTH, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    """Heads on ranks; tokens come first, as in Megatron."""

    def __init__(self, group: Any, enter: Any = Copy, leave: Any = Reduce) -> None:
        super().__init__()
        self.qkv, self.down = Column(WIDTH, 3 * WIDTH, group, enter), Row(WIDTH, WIDTH, group, leave)

    def forward(self, x: Tensor) -> Tensor:
        x = self.qkv(x)
        tokens, examples, width = x.shape
        q, k, v = x.view(tokens, examples, 2, width // 2).permute(1, 2, 0, 3).chunk(3, -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.down(out.permute(2, 0, 1, 3).reshape(tokens, examples, width // 3))


class Layer(nn.Module):
    def __init__(self, group: Any, enter: Any = Copy, leave: Any = Reduce) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(group, enter, leave), Mlp(group, enter, leave)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class VocabularyEmbedding(nn.Module):
    """Rows of the table on ranks: each looks up what it has, and zeros elsewhere."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY // 2, WIDTH))
        self.group, self.start = group, dist.get_rank(group) * (VOCABULARY // 2)

    def forward(self, ids: Tensor) -> Tensor:
        elsewhere = (ids < self.start) | (ids >= self.start + VOCABULARY // 2)
        own = (ids - self.start).clone()
        own[elsewhere] = 0
        out = F.embedding(own, self.weight)
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return Reduce.apply(out, self.group)


class VocabularyLoss(torch.autograd.Function):
    """Cross entropy of logits of which each rank has some of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        largest = logits.max(-1)[0]
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        start = dist.get_rank(group) * logits.shape[-1]
        elsewhere = (target < start) | (target >= start + logits.shape[-1])
        own = (target - start).clone()
        own[elsewhere] = 0
        picked = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).clone()
        picked[elsewhere] = 0.0
        dist.all_reduce(picked, group=group)
        powers = logits.exp()
        total = powers.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(powers / total.unsqueeze(-1), elsewhere, own)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares, elsewhere, own = ctx.saved_tensors
        taken = torch.zeros_like(shares).scatter(-1, own.unsqueeze(-1), 1.0)
        return (shares - taken * (~elsewhere).unsqueeze(-1)) * gradient.unsqueeze(-1), None, None


class Language(nn.Module):
    """Tokens to the sum of their losses."""

    def __init__(self, group: Any, body: nn.Module, enter: Any = Copy) -> None:
        super().__init__()
        self.embedding, self.body, self.norm = VocabularyEmbedding(group), body, nn.LayerNorm(WIDTH)
        self.group, self.enter = group, enter

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.norm(self.body(self.embedding(ids)))
        x = x if self.enter is None else self.enter.apply(x, self.group)
        return VocabularyLoss.apply(F.linear(x, self.embedding.weight), target, self.group).sum() / 100


def language(enter: Any = Copy) -> Made:
    """A small language model whose table is its head too."""
    _, group = groups()
    ids, target = (torch.randint(VOCABULARY, (TOKENS, EXAMPLES)) for _ in range(2))
    batch = {"dp": "S(1)"}
    return Language(group, Layer(group), enter), {"ids": ids, "target": target}, {
        "placements": {"ids": batch, "target": batch, **PLACEMENTS}}  # fmt: skip


class Loss(nn.Module):
    """A body and the squared distance of its result, summed over the tokens of a rank and divided by a number."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.body(x) - target).square().sum() / 100


def sum_gradients(module: nn.Module, names: tuple[str, ...], group: Any) -> Callable[[], None]:
    """What a trainer does after the backward, of parameters whose gradients each rank has a summand of."""

    def finish() -> None:
        for name, each in module.named_parameters():
            if name.endswith(names):
                dist.all_reduce(each.grad, group=group)

    return finish


def factory_of(
    body: Callable[[Any, Any], nn.Module], summed: tuple[str, ...] = (), x: Mapping[str, str] | None = None
) -> Callable[[], Made]:
    """A factory of a body, which is given the groups of data and of layers. `summed`: parameters whose gradients are summed over
    the ranks of layers after the backward. `x`: how its input and result are cut."""

    def factory() -> Made:
        data, layers = groups()
        module = Loss(body(data, layers))
        tokens = TOKENS if x is None else TOKENS // 2
        inputs = {name: torch.randn(tokens, EXAMPLES, WIDTH) for name in ("x", "target")}
        places = dict.fromkeys(inputs, {"dp": "S(1)", **(x or {})})
        return module, inputs, {"placements": {**places, **PLACEMENTS}, "after_backward": sum_gradients(module, summed, layers)}

    return factory


def tokens_cut(summed: tuple[str, ...]) -> Callable[[], Made]:
    """A layer whose tokens are cut between its products (sequence parallelism)."""

    def body(_: Any, group: Any) -> nn.Module:
        return Layer(group, GatherTokens, ReduceTokens)

    def factory() -> Made:
        module, inputs, options = factory_of(body, summed, {"tp": "S(0)"})()
        whole = TotalLoss(module.body, groups()[1])
        return whole, inputs, {**options, "after_backward": sum_gradients(whole, summed, whole.group)}

    return factory


class TotalLoss(Loss):
    """The loss over the tokens of all ranks."""

    def __init__(self, body: nn.Module, group: Any) -> None:
        super().__init__(body)
        self.group = group

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return Reduce.apply(super().forward(x, target), self.group)
