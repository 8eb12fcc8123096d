"""A custom ``autograd.Function`` has the gradients of eager in the captured graph, or it is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.nn.functional import linear

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ir.graph import Graph


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Calls(nn.Module):
    """A function with this backward, that reads its argument x and a module."""

    def __init__(self, backward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(4, 4)

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, scale: nn.Module | None = None) -> Tensor:
                ctx.save_for_backward(x)
                ctx.scale = scale
                return x.tanh()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
                return backward(ctx, g), None

        self.function = Own

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.function.apply(self.first(x), self.scale)).square().mean()


def check(model: nn.Module, *shape: int) -> Graph:
    """The graph, whose loss and gradients are those of eager."""
    torch.manual_seed(0)
    model = model.double()
    batch = {"x": torch.randn(*shape or (5, 6), dtype=torch.float64)}
    loss = model(**batch)
    loss.backward()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    graph = capture(model, (), batch)
    found, gradients = loss_and_gradients(graph, state, batch)
    torch.testing.assert_close(torch.as_tensor(found), loss.detach(), check_dtype=False)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.get(name), parameter.grad, msg=name)
    return graph


def detaches_part(ctx: Any, g: Tensor) -> Tensor:
    return g + 2 * g.detach() + 3 * g.data


def without_gradients(ctx: Any, g: Tensor) -> Tensor:
    with torch.no_grad():
        twice = g * 2
    return twice + g


def in_inference_mode(ctx: Any, g: Tensor) -> Tensor:
    with torch.inference_mode():
        twice = g * 2
    return twice + g


def all_without_gradients(ctx: Any, g: Tensor) -> Tensor:
    with torch.no_grad():
        return g * 2


def calls_another(ctx: Any, g: Tensor) -> Tensor:
    return Reverse.apply(g * 2) + Reverse.apply(ctx.saved_tensors[0].sum(0)) * g


def reads_a_module(ctx: Any, g: Tensor) -> Tensor:
    return g @ ctx.scale.weight


def asks(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return g * (1 + 2 * g.requires_grad + 4 * x.requires_grad + 8 * torch.is_grad_enabled())


def picks(ctx: Any, g: Tensor) -> Tensor:
    mask = torch.zeros_like(g)
    mask.scatter_(-1, ctx.saved_tensors[0].topk(2, -1).indices, 1.0)
    return g * mask * (mask > 0).type_as(g)


def writes_the_gradient(ctx: Any, g: Tensor) -> Tensor:
    g = g.masked_fill_(ctx.saved_tensors[0] > 0, 0)
    g[:, 0] = 0
    return g.mul_(0.5)


def writes_what_is_saved(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return x.mul_(2) * g


def puts_together(ctx: Any, g: Tensor) -> Tensor:
    out = g.new_zeros(g.shape)
    out[0].copy_(g[1])
    out[:, 1:3] += g[:, 1:3]
    parts = torch.cat([out[:, :3], torch.zeros(g.shape[0], 1, dtype=g.dtype)], 1)
    return torch.where(ctx.saved_tensors[0] > 0, parts, 0.0)


def multiplies(ctx: Any, g: Tensor) -> Tensor:
    return linear(g, ctx.scale.weight.t())


def fills_what_is_empty(ctx: Any, g: Tensor) -> Tensor:
    out = torch.empty_like(g)
    for column in range(3):
        out[:, column] = g[:, column + 1]
    out[:, 3:] = 0
    return out


def adds_what_is_zero(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    rows = torch.zeros(1, x.shape[1], dtype=g.dtype)
    zeros = rows.repeat(x.shape[0], 1) + torch.zeros_like(x).sum(0) / 2 + rows[torch.zeros(x.shape[0], dtype=torch.long)]
    halves = torch.cat([zeros[:, :2], torch.nn.functional.pad(zeros[:, 2:3], (0, x.shape[1] - 3))], 1)
    return torch.where(x > 0, g, x * 0) + 0.0 * (1 - x) + zeros + halves + zeros @ x.t() @ x


LINEAR = [
    adds_what_is_zero,
    detaches_part, without_gradients, in_inference_mode, all_without_gradients, calls_another, reads_a_module, asks, picks,
    writes_the_gradient, writes_what_is_saved, puts_together, multiplies, fills_what_is_empty,
]  # fmt: skip


@pytest.mark.parametrize("backward", LINEAR)
def test_a_backward_runs_without_gradients(backward: Callable[[Any, Tensor], Tensor]) -> None:
    """Parts of the gradient were lost at ``detach()`` and ``no_grad``, another function's backward was in the place of its
    forward, and a module's weight got gradients, all without a word; others were refused as not linear."""
    check(Calls(backward))


def adds_a_penalty(ctx: Any, g: Tensor) -> Tensor:
    return g + 0.1 * ctx.saved_tensors[0].sign()


def adds_a_number(ctx: Any, g: Tensor) -> Tensor:
    return g + 0.1


def fills_with_ones(ctx: Any, g: Tensor) -> Tensor:
    return torch.where(ctx.saved_tensors[0] > 0, g, 1.0)


def writes_ones(ctx: Any, g: Tensor) -> Tensor:
    g = g.clone()
    g[:, 0] = 1
    return g


def joins(ctx: Any, g: Tensor) -> Tensor:
    return torch.cat([g[:, :2], ctx.saved_tensors[0][:, 2:]], 1)


def has_a_bias(ctx: Any, g: Tensor) -> Tensor:
    return torch.addmm(ctx.scale.bias, g, ctx.scale.weight)


def ignores_it(ctx: Any, g: Tensor) -> Tensor:
    return torch.ones_like(g)


def is_its_sign(ctx: Any, g: Tensor) -> Tensor:
    return g.sign()


def rounds(ctx: Any, g: Tensor) -> Tensor:
    return (g * 1000).round() / 1000


def leaves_the_rest(ctx: Any, g: Tensor) -> Tensor:
    return g - torch.div(g, 0.01, rounding_mode="floor")


def compares(ctx: Any, g: Tensor) -> Tensor:
    return g + (g > 0)


def has_its_sign(ctx: Any, g: Tensor) -> Tensor:
    return torch.copysign(ctx.saved_tensors[0].abs(), g) + g


def draws_in_its_place(ctx: Any, g: Tensor) -> Tensor:
    return g.clone().normal_() * 1e-3


def clips(ctx: Any, g: Tensor) -> Tensor:
    return g.clamp(-0.1, 0.1)


def normalizes(ctx: Any, g: Tensor) -> Tensor:
    return g / g.norm()


def takes_derivatives(ctx: Any, g: Tensor) -> Tensor:
    x = ctx.saved_tensors[0].detach().requires_grad_()
    with torch.enable_grad():
        y = x.tanh()
    return torch.autograd.grad(y, x, g)[0]


NONLINEAR = {
    adds_a_penalty: "into the loss", adds_a_number: "into the loss", fills_with_ones: "into the loss",
    writes_ones: "into the loss", joins: "into the loss", has_a_bias: "into the loss", ignores_it: "into the loss",
    is_its_sign: r"not linear.*sign", has_its_sign: r"not linear.*copysign", draws_in_its_place: "not linear",
    rounds: r"not linear.*round", leaves_the_rest: "not linear", compares: "not linear", clips: "not linear",
    normalizes: "norm", takes_derivatives: "torch.utils.checkpoint",
}  # fmt: skip


@pytest.mark.parametrize("backward", NONLINEAR)
def test_a_backward_that_is_not_linear_is_refused(backward: Callable[[Any, Tensor], Tensor]) -> None:
    """What a backward adds to the gradient, and all of a step's, was lost without a word."""
    with pytest.raises(CaptureError, match=rf"test_custom_functions.py:\d+: .*Own .*{NONLINEAR[backward]}") as error:
        check(Calls(backward))
    assert "\n" not in str(error.value)


class Repeats(nn.Module):
    """Equal layers, of which one is traced."""

    def __init__(self, backward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Layer(backward)) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Layer(nn.Module):
    def __init__(self, backward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), Calls(backward).function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function.apply(self.inner(x), None)


def test_backwards_of_equal_layers() -> None:
    check(Repeats(without_gradients))
    with pytest.raises(CaptureError, match="into the loss"):
        check(Repeats(adds_a_penalty))


class Asking(torch.autograd.Function):
    """Its forward asks which arguments require gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else x * 0, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g @ weight, g.t() @ x


class CarriesALoss(torch.autograd.Function):
    """Word for word of DeepSeek's mixtures of experts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype, ctx.required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor | None]:
        return g, torch.ones(1, dtype=ctx.dtype, device=g.device) if ctx.required else None


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Asking.apply(self.first(x).tanh(), self.second.weight).square().mean()


class Carries(Asks):
    """The loss requires a gradient where the first layer trains."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        loss = h.softmax(-1).mean(0).square().sum()
        return self.second(CarriesALoss.apply(h.tanh(), loss[None])).square().mean()


def test_the_forward_knows_which_arguments_require_gradients() -> None:
    """None did, without a word: the loss that DeepSeek's experts add had no gradient."""
    check(Asks())
    with pytest.raises(CaptureError, match=r"CarriesALoss.*into the loss"):
        check(Carries())
    frozen = Carries()
    frozen.first.requires_grad_(False)
    check(frozen)


class Complex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.complex(x, 2 * x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.real


class GivesComplex(Asks):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(Complex.apply(self.first(x)).imag).square().mean()


def test_complex_results_are_refused() -> None:
    """They had no gradients, without a word."""
    with pytest.raises(CaptureError, match="complex"):
        check(GivesComplex())


def test_a_linear_backward_costs_no_more_operations() -> None:
    """The check leaves nothing in the graph: one product for the backward, one difference and one sum."""
    graph = check(Calls(all_without_gradients))
    operations = [node.op.split(".")[1] for block in graph.blocks for node in block.nodes]
    assert operations.count("detach") == 2 and operations.count("add") == 1 and operations.count("mul") == 1
