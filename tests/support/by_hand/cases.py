"""Right and wrong modules that are parallel by hand.

The wrong ones are findings of Megatron-LM issue 7452 (by their numbers), two of other issues, and what Megatron's layers become
where a collective is left out, doubled or on another group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce as differentiable_all_reduce

from support.by_hand.layers import (
    EXAMPLES,
    TOKENS,
    WIDTH,
    Column,
    Copy,
    Gather,
    Layer,
    Made,
    Mlp,
    Reduce,
    ReduceTwice,
    Row,
    Split,
    VocabularyEmbedding,
    VocabularyLoss,
    factory_of,
    groups,
    language,
    tokens_cut,
)

NORMS = ("first.weight", "first.bias", "second.weight", "second.bias", "down.bias")


class HeadNorm(nn.Module):
    """Heads on ranks, which share one norm (finding 11: its gradient is a summand on each rank)."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.up, self.norm, self.down = Column(WIDTH, 2 * WIDTH, group), nn.RMSNorm(WIDTH // 2), Row(2 * WIDTH, WIDTH, group)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:-1], 2, WIDTH // 2)
        return self.down(self.norm(heads).flatten(-2))


class SharedKey(nn.Module):
    """A narrow product whose result all heads read, on which ranks have heads (TransformerEngine issue 1975)."""

    def __init__(self, group: Any, enter: Any) -> None:
        super().__init__()
        self.narrow, self.up, self.down = nn.Linear(WIDTH, 4), Column(WIDTH, 8, group), Row(8, WIDTH, group)  # a head on each
        self.group, self.enter = group, enter

    def forward(self, x: Tensor) -> Tensor:
        key = self.narrow(x)
        key = key if self.enter is None else self.enter.apply(key, self.group)
        return self.down((self.up(x).unflatten(-1, (1, 4)) * key.unsqueeze(-2)).flatten(-2))


class BiasOnAll(Row):
    """A bias that every rank adds before the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return Reduce.apply(F.linear(x, self.weight, self.bias), self.group)


class TwoProducts(nn.Module):
    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Gathered(nn.Module):
    """Columns that are gathered, and read by all ranks, or by each for a part of the next product."""

    def __init__(self, group: Any, partly: bool) -> None:
        super().__init__()
        self.up, self.group = Column(WIDTH, WIDTH, group), group
        self.narrow = nn.Linear(WIDTH, WIDTH)
        parts = TwoProducts(Column(WIDTH, WIDTH, group, None), Row(WIDTH, WIDTH, group))
        self.next = parts if partly else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.next(Gather.apply(self.up(self.narrow(x)), self.group))


class Splitted(nn.Module):
    """Columns of an activation that all ranks have, of which each takes its own for a product of parts."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.narrow, self.down, self.group = nn.Linear(WIDTH, WIDTH), Row(WIDTH, WIDTH, group), group

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Split.apply(self.narrow(x), self.group))


class Masked(nn.Module):
    """The mean loss of the tokens that a mask leaves, which are cut over ranks. Findings 3 and 9: each rank divides by its own
    number of them."""

    def __init__(self, group: Any, body: nn.Module, reduced: bool, add: bool) -> None:
        super().__init__()
        self.body, self.group, self.reduced, self.add = body, group, reduced, add

    def forward(self, x: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        losses = (self.body(x) - target).square().mean(-1) * mask
        count = mask.sum()
        if self.reduced:
            dist.all_reduce(count, group=self.group)
        loss = losses.sum() / count
        return Reduce.apply(loss, self.group) if self.add else loss


class Router(nn.Module):
    """An auxiliary loss of a router, whose tokens are cut over ranks: each adds it as often as it has tokens. Finding 10: the sum
    of all counts is written over how many this rank has."""

    def __init__(self, group: Any, apart: bool) -> None:
        super().__init__()
        self.gate, self.group, self.apart = nn.Linear(WIDTH, 4, bias=False), group, apart

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        own = mask.sum()
        total = own.clone() if self.apart else own
        dist.all_reduce(total, group=self.group)
        shares = self.gate(x).softmax(-1) * mask.unsqueeze(-1)
        used = ReduceTwice.apply(shares.sum((0, 1)), self.group) / total
        return Reduce.apply(used.square().sum() * own / total, self.group)


class FunctionalCopy(torch.autograd.Function):
    """`Copy` with a functional collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return functional.all_reduce(gradient, "sum", ctx.group), None


class FunctionalReduce(torch.autograd.Function):
    """`Reduce` with a functional collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return functional.all_reduce(x, "sum", group) + 0.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Differentiable:
    """The all-reduce of ``torch.distributed.nn``, whose backward sums gradients: as if each rank had a loss of its own."""

    @staticmethod
    def apply(x: Tensor, group: Any) -> Tensor:
        return differentiable_all_reduce(x, group=group)


class Counted(Mlp):
    """Divides by how many tokens all ranks have, which each of them knows of itself."""

    def forward(self, x: Tensor) -> Tensor:
        count = torch.tensor(float(x.shape[1]))
        dist.all_reduce(count, group=self.up.group)
        return super().forward(x) / count


class PaddingMask(nn.Module):
    """A mask of all tokens, of which each rank takes those of its activations (finding 5: by its rank in another group)."""

    def __init__(self, group: Any, other: Any) -> None:
        super().__init__()
        self.gate, self.group, self.other = nn.Linear(WIDTH, WIDTH), group, other

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask = mask.chunk(2, 0)[dist.get_rank(self.other)]
        return Reduce.apply((self.gate(x).square() * mask.unsqueeze(-1)).sum(), self.group)


class Sink(nn.Module):
    """Heads on ranks, each with a number of its own beside a norm that all share."""

    def __init__(self, group: Any, data: Any) -> None:
        super().__init__()
        self.data = data
        self.first, self.up, self.down = nn.LayerNorm(WIDTH), Column(WIDTH, 2 * WIDTH, group), Row(2 * WIDTH, WIDTH, group)
        self.sink = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out = self.down(torch.sigmoid(self.up(self.first(x)) + self.sink))
        return Reduce.apply((out - target).square().sum() / 100, self.data)


def sink(sharded: tuple[str, ...]) -> Callable[[], Made]:
    """Gradients are averaged, and their norm is taken: of what ranks have shards of, squares are summed over them. Finding 8: not
    those of the sinks."""

    def factory() -> Made:
        data, group = groups()
        module = Sink(group, data)

        def finish() -> Tensor:
            squares = {True: torch.zeros(()), False: torch.zeros(())}
            for name, each in module.named_parameters():
                dist.all_reduce(each.grad, group=data)
                squares[name in sharded] = squares[name in sharded] + each.grad.square().sum()
            dist.all_reduce(squares[True], group=group)
            return (squares[True] + squares[False]).sqrt()

        inputs = {name: torch.randn(TOKENS, EXAMPLES, WIDTH) for name in ("x", "target")}
        places = {"x": {"dp": "S(1)"}, "target": {"dp": "S(1)"}, "*up.*": {"tp": "S(0)"}, "sink": {"tp": "S(0)"},
                  "*down.weight": {"tp": "S(1)"}}  # fmt: skip
        return module, inputs, {"placements": places, "after_backward": finish, "data": ()}

    return factory


def masked(over_data: bool, reduced: bool) -> Callable[[], Made]:
    """Tokens of a mask over the ranks of data (finding 3), or over those of layers, which then are the context's (finding 9)."""

    def factory() -> Made:
        data, group = groups()
        module = Masked(data if over_data else group, nn.Linear(WIDTH, WIDTH), reduced, not over_data)
        inputs = {"x": torch.randn(TOKENS, EXAMPLES, WIDTH), "target": torch.randn(TOKENS, EXAMPLES, WIDTH),
                  "mask": torch.ones(TOKENS, EXAMPLES)}  # fmt: skip
        place = {"dp": "S(1)"} if over_data else {"dp": "R", "tp": "S(0)"}
        finish = None if over_data else lambda: [dist.all_reduce(each.grad, group=group) for each in module.parameters()]
        options = {"placements": dict.fromkeys(inputs, place), "after_backward": finish, "data": ("dp",) if over_data else ()}
        return module, inputs, options

    return factory


def routed(make: Callable[[Any, Any], nn.Module], data_axes: tuple[str, ...], tokens: int) -> Callable[[], Made]:
    """Tokens that are cut over the ranks of layers; gradients are summed over them after the backward. `tokens`: of the mask."""

    def factory() -> Made:
        data, group = groups()
        module = make(data, group)
        inputs = {"x": torch.randn(TOKENS, EXAMPLES, WIDTH), "mask": torch.ones(tokens, EXAMPLES)}
        batch = dict.fromkeys(data_axes, "S(1)")
        places = {"x": {**batch, "tp": "S(0)"}, "mask": {**batch, **({"tp": "S(0)"} if tokens == TOKENS else {})}}

        def finish() -> None:
            for each in module.parameters():
                dist.all_reduce(each.grad, group=group)

        return module, inputs, {"placements": places, "after_backward": finish, "data": data_axes}

    return factory


class Head(nn.Module):
    """A product of parts below a head over the vocabulary, with nothing replicated between them that could tell."""

    def __init__(self, group: Any, enter: Any) -> None:
        super().__init__()
        self.embedding, self.mlp, self.group, self.enter = VocabularyEmbedding(group), Mlp(group), group, enter
        self.mlp.down.bias.requires_grad_(False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.mlp(self.embedding(ids))
        x = x if self.enter is None else self.enter.apply(x, self.group)
        return VocabularyLoss.apply(F.linear(x, self.embedding.weight), target, self.group).sum()


def head(enter: Any) -> Callable[[], Made]:
    def factory() -> Made:
        _, inputs, options = language()
        return Head(groups()[1], enter), inputs, options

    return factory


@dataclass(frozen=True, slots=True)
class Case:
    """`says`: words of the first line that is wrong, none where all is right. `gradients`: whether they are not those of the
    loss, which else is wrong itself."""

    factory: Callable[[], Made]
    says: str = ""
    gradients: bool = True


CASES = {
    "mlp": Case(factory_of(lambda _, group: Mlp(group))),
    "layer": Case(factory_of(lambda _, group: Layer(group))),
    "functional collectives": Case(factory_of(lambda _, group: Layer(group, FunctionalCopy, FunctionalReduce))),
    "a number of each rank": Case(factory_of(lambda _, group: Counted(group))),
    "tokens cut": Case(tokens_cut(NORMS)),
    "language": Case(language),
    "head": Case(head(Copy)),
    "gathered": Case(factory_of(lambda _, group: Gathered(group, False))),
    "split": Case(factory_of(lambda _, group: Splitted(group))),
    "shared key": Case(factory_of(lambda _, group: SharedKey(group, Copy))),
    "3 right": Case(masked(True, True)),
    "9 right": Case(masked(False, True)),
    "5 right": Case(routed(lambda _, group: PaddingMask(group, group), ("dp",), 2 * TOKENS)),
    "8 right": Case(sink(("up.weight", "up.bias", "down.weight", "sink"))),
    "10 right": Case(routed(lambda _, group: Router(group, True), (), TOKENS)),
    "11 right": Case(factory_of(lambda _, group: HeadNorm(group), ("norm.weight",))),
    "3": Case(masked(True, False), "div: on dp", False),
    "4": Case(factory_of(lambda data, _: Mlp(data)), "all_reduce over dp mixes the shards", False),
    "5": Case(routed(lambda data, group: PaddingMask(group, data), ("dp",), 2 * TOKENS), "its part of a value", False),
    "8": Case(sink(("up.weight", "up.bias", "down.weight")), "add: on tp", False),
    "9": Case(masked(False, False), "div: on tp", False),
    "10": Case(routed(lambda _, group: Router(group, False), (), TOKENS), "2 times too large", False),
    "11": Case(factory_of(lambda _, group: HeadNorm(group)), "gradient of body.norm.weight is partial on tp"),
    "a key of all heads": Case(
        factory_of(lambda _, group: SharedKey(group, None)), "gradient of body.narrow.weight is partial on tp"
    ),
    "norms of cut tokens": Case(tokens_cut(NORMS[1:]), "gradient of body.first.weight is partial on tp"),
    "no copy": Case(factory_of(lambda _, group: Layer(group, None)), "add: on tp"),
    "no sum": Case(factory_of(lambda _, group: Mlp(group, leave=None)), "add: on tp", False),
    "torch.distributed.nn": Case(factory_of(lambda _, group: Mlp(group, leave=Differentiable)), "2 times too large"),
    "two sums": Case(factory_of(lambda _, group: Mlp(group, leave=ReduceTwice)), "2 times too large"),
    "a bias on all": Case(
        factory_of(lambda _, group: TwoProducts(Column(WIDTH, WIDTH, group), BiasOnAll(WIDTH, WIDTH, group))),
        "added once by each rank",
    ),
    "gradients of a gather": Case(factory_of(lambda _, group: Gathered(group, True)), "its part of a value that is partial"),
    "no copy below a head": Case(head(None), "the gradient of that"),
}  # fmt: skip
