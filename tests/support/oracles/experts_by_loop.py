"""A mixture of experts as a loop over tokens, written without the code under test but for the activations; and examples of it."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.clamp(min=0).pow(2),
}
GATES = (*FUNCTIONS, "swiglu_clamped(1.702,0.7)", "silu_clamped(0.7)", "gelu_capped(0.7)")


def gate(activation: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What is made of gate and up."""
    name, _, inner = activation.partition("(")
    numbers = [float(word) for word in inner.rstrip(")").split(",") if word]
    if name == "swiglu_clamped":
        scale, limit = numbers
        return lambda a, b: (b.clamp(-limit, limit) + 1) * a.clamp(max=limit) * (scale * a.clamp(max=limit)).sigmoid()
    function, kind = FUNCTIONS[name.partition("_c")[0]], name.partition("_c")[2]
    if kind == "lamped":
        return lambda a, b: function(a.clamp(max=numbers[0])) * b.clamp(-numbers[0], numbers[0])
    if kind == "apped":
        return lambda a, b: function(a).clamp(max=numbers[0]) * b.clamp(-numbers[0], numbers[0])
    return lambda a, b: function(a) * b


class Example(NamedTuple):
    """The arguments of the operator, in its order."""

    x: Tensor
    experts: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    activation: str = "silu"
    layout: str = "halves"

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that have gradients."""
        return tuple(each for each in (self.x, self.weights, *self[3:7]) if isinstance(each, Tensor))

    def leaves(self) -> Example:
        """Copies that follow gradients."""

        def leaf(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.detach().clone().requires_grad_()

        new = [leaf(each) for each in (self.x, self.weights, *self[3:7])]
        return Example(new[0], self.experts, *new[1:], *self[7:])  # type: ignore[arg-type]


def example(
    tokens: tuple[int, ...] = (3, 5), number: int = 4, k: int = 2, hidden: int = 8, inner: int = 6, *,
    activation: str = "silu", layout: str = "halves", bias: bool = True, seed: int = 0, nowhere: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Example:  # fmt: skip
    """Random numbers. `nowhere`: some copies go nowhere. Each token's experts differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = inner if "plain" in layout else 2 * inner
    up, down = draw(number, wide, hidden), draw(number, hidden, inner)
    if "transposed" in layout:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    choices = number + nowhere
    experts = torch.rand((*tokens, choices), generator=generator).topk(k, -1).indices
    biases = (draw(number, wide), draw(number, hidden)) if bias else (None, None)
    return Example(draw(*tokens, hidden), experts, draw(*tokens, k), up, down, *biases, activation, layout)


def by_loop(given: Example) -> Tensor:
    """Copy by copy."""
    x, experts, weights, up, down, up_bias, down_bias, activation, layout = given
    k, transposed = experts.shape[-1], "transposed" in layout
    rows = []
    for token, ids, scales in zip(x.flatten(0, -2), experts.view(-1, k), weights.reshape(-1, k), strict=True):
        total = torch.zeros_like(token)
        for expert, scale in zip(ids.tolist(), scales, strict=True):
            if expert == up.shape[0]:
                continue
            wide = token @ (up[expert] if transposed else up[expert].t())
            wide = wide if up_bias is None else wide + up_bias[expert]
            if "plain" in layout:
                inner = FUNCTIONS[activation](wide)
            elif "interleaved" in layout:
                inner = gate(activation)(wide[::2], wide[1::2])
            else:
                inner = gate(activation)(*wide.chunk(2))
            out = inner @ (down[expert] if transposed else down[expert].t())
            total = total + scale * (out if down_bias is None else out + down_bias[expert])
        rows.append(total)
    unused = torch.stack([each.sum() for each in given.tensors]).sum() * 0  # then gradients are zeros
    return torch.stack(rows).view(x.shape) + unused


def every_token_through_every_expert(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
    activation: str, layout: str, capacity: None = None,
) -> Tensor:  # fmt: skip
    """Every token through every expert, weighted."""
    total = torch.zeros_like(x)
    for expert in range(up.shape[0]):
        one, two = (each[expert] if "transposed" in layout else each[expert].t() for each in (up, down))
        wide = x @ one if up_bias is None else x @ one + up_bias[expert]
        if "plain" in layout:
            inner = FUNCTIONS[activation](wide)
        else:
            first, more = (wide[..., ::2], wide[..., 1::2]) if "interleaved" in layout else wide.chunk(2, -1)
            inner = gate(activation)(first, more)
        out = inner @ two if down_bias is None else inner @ two + down_bias[expert]
        total = total + out * (weights * (experts == expert)).sum(-1, keepdim=True)
    return total


def capacity(experts: Tensor, number: int, factor: float) -> Tensor:
    """As `bounded`, from a factor."""
    return limited_experts(experts, number, ceil(factor * experts.shape[-2] * experts.shape[-1] / number))


def owned(group: list[list[Any]]) -> list[Tensor]:
    """All ranks of an axis at once: each computes the copies of its experts."""
    return [
        every_token_through_every_expert(args[0], args[1] - rank * args[3].shape[0], *args[2:]) for rank, args in enumerate(group)
    ]


def dispatched(group: list[list[Any]]) -> list[Tensor]:
    """All ranks of an axis at once: each token sees all ranks' experts."""
    matrices = [None if group[0][at] is None else torch.cat([args[at] for args in group]) for at in range(3, 7)]
    return [every_token_through_every_expert(*args[:3], *matrices, *args[7:]) for args in group]  # type: ignore[arg-type]


def limited_experts(experts: Tensor, number: int, limit: int) -> Tensor:
    """Copy by copy: of each group ``[T, K]`` an expert takes the first `limit`."""
    out = experts.clone()
    for group in out.view(-1, *experts.shape[-2:]):
        taken = [0] * (number + 1)
        for token in group:
            for j, expert in enumerate(token.tolist()):
                taken[expert] += 1
                if taken[expert] > limit:
                    token[j] = number
    return out


def random_gradients(result: Tensor, given: Example, seed: int = 1) -> list[Tensor]:
    """Of all tensors, for a random gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
    return list(torch.autograd.grad(result, given.tensors, grad))
