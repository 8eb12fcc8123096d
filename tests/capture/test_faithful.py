"""What export would change silently is kept, or is an error that names the line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import LOSS_OUTSIDE, capture
from autopar.errors import CaptureError


class NoGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.inner(x).abs()
        return (self.inner(x) * scale).sum()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


class UsesStraight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return Straight.apply(self.inner(x)).sum()


class Reverse(torch.autograd.Function):
    """Reverses and scales the gradient, with new-style context."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x * 1.0, x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, ctx.scale = inputs
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return -ctx.scale * grad.flip(-1) * x.cos(), None


class Clip(torch.autograd.Function):
    """A backward that is not linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = torch.tensor([[1.0, -2.0], [0.5, float("inf")]])
        self.phases = torch.polar(torch.ones(2), torch.tensor([0.3, 0.7]))
        self.norm = nn.BatchNorm1d(4)


class Reversed(Small):
    def forward(self, x: Tensor) -> Tensor:
        y, best = Reverse.apply(self.inner(x), 0.5)
        return (y.square().sum(-1) * best).sum()


class Clips(Small):
    def forward(self, x: Tensor) -> Tensor:
        return Clip.apply(self.inner(x)).square().sum()


class Constants(Small):
    """A tensor made in the forward, plain attributes (complex too), and a list of numbers."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * torch.tensor([0.1, 2.0, 3.0, 4.0]) + torch.tensor([2.0]).to(x.device)
        turned = torch.view_as_real(torch.view_as_complex(y.reshape(-1, 2, 2)) * self.phases)
        return (turned * self.table[0]).square().sum() + y[:, [0, 3]].sum()


class ClassWeights(Small):
    def forward(self, x: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 0.5, 2.0, 0.1])
        target = torch.where(x[:, 0] > 1, -100, x.argmax(-1))
        return F.cross_entropy(self.inner(x), target, weight=weight, label_smoothing=0.1)


class SoftLabels(Small):
    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.inner(x), x.softmax(-1), label_smoothing=0.1) + F.cross_entropy(
            self.inner(x), x.softmax(-1), weight=torch.tensor([1.0, 0.5, 2.0, 0.1]), reduction="sum"
        )


class EachLoss(Small):
    def forward(self, x: Tensor) -> Tensor:
        target = x.argmax(-1)
        each = F.cross_entropy(self.inner(x), target, reduction="none", label_smoothing=0.2, ignore_index=2)
        return (each * x[:, 0]).sum() + F.nll_loss(self.inner(x).log_softmax(-1), target, ignore_index=1)


class CalledTwice(Small):
    """In float64: its sums cancel, so that float32 gradients of equal programs differ by 1e-4 on some CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(self.norm(self.inner(x)).square()) * x).square().sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.inner(x).sum() > 0:
            return self.inner(x).sum()
        return self.inner(x).mean()


class Mixed(nn.Module):
    """A 0-d parameter, two dtypes in one block, a frozen and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.first, self.second, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.low = nn.Linear(4, 4, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.second(torch.relu(self.first(x)))) * self.scale
        return (self.low(x.bfloat16()).float() ** 2).mean()


class ListsAsIndices(nn.Module):
    """With one number, and with several."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y[:, [-1]] * y[:, [1]] + y[:, [1, 3]].square().sum(1, keepdim=True)).sum() + y[:, [2, 2]].exp().sum()


@pytest.mark.parametrize(
    "kind", [NoGrad, Mixed, ListsAsIndices, UsesStraight, Reversed, Constants, ClassWeights, SoftLabels, EachLoss, CalledTwice]
)
def test_equals_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(6, 4, dtype=next(model.parameters()).dtype)
    graph = capture(model, (x,))
    expected = model(x)
    expected.backward()
    fresh = kind()
    tensors = (*model.named_parameters(), *fresh.named_buffers())
    loss, gradients = loss_and_gradients(graph, {name: p.detach() for name, p in tensors}, {"x": x})
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, msg=name)


def test_no_grad_nodes_are_marked() -> None:
    graph = capture(NoGrad(), (torch.randn(6, 4),))
    marked = [node for block in graph.blocks for node in block.nodes if node.no_grad]
    assert [node.op for node in marked] == ["aten.linear", "aten.abs"]
    assert not any(value.differentiable for node in marked for value in node.outputs)


@pytest.mark.parametrize("kind", [Clips, Branches])
def test_refused_with_the_line(kind: type[nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"test_faithful\.py:\d+") as caught:
        capture(kind(), (torch.randn(6, 4),))
    assert "\n" not in str(caught.value)


def test_hooks_are_refused() -> None:
    model = NoGrad()
    model.inner.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="inner.*backward hook"):
        capture(model, (torch.randn(6, 4),))


def test_the_model_is_untouched() -> None:
    model = Mixed()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    capture(model, (torch.randn(6, 4),))
    for name, parameter in model.named_parameters():
        assert id(parameter) == before[name][0] and torch.equal(parameter, before[name][1])


def test_running_statistics_are_updates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) ** 2).sum()

    graph = capture(Summed(), (torch.randn(6, 4),))
    written = {parameter for block in graph.blocks for parameter, _ in block.updates}
    assert written == {"body_1_running_mean", "body_1_running_var", "body_1_num_batches_tracked"}


def test_without_a_loss() -> None:
    """The result takes gradients; the graph's loss is a stand-in."""
    graph = capture(nn.Linear(4, 4), (torch.randn(6, 4),))
    assert [output.asked for output in graph.outputs] == [":gradient"] and LOSS_OUTSIDE in graph.notes
    assert graph.interface is not None and not graph.interface.has_loss


def test_a_loss_of_its_own_is_put_in() -> None:
    graph = capture(nn.Linear(4, 4), (torch.randn(6, 4), torch.randn(6, 4)), loss_fn=nn.functional.mse_loss)
    assert graph.outputs == () and [value.name for value in graph.inputs] == ["input", "target"]
    assert set(graph.parameters()) == {"weight", "bias"}
    learned = nn.BCEWithLogitsLoss(), nn.Linear(2, 2)
    with pytest.raises(CaptureError, match="Linear has parameters"):
        capture(nn.Linear(4, 4), (torch.randn(6, 4), torch.randn(6, 4)), loss_fn=learned[1])


def test_a_loss_of_three_arguments_says_how_two_are_enough() -> None:
    """Distillation: labels and the teacher's result."""

    def distill(result: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        return (result - labels).square().mean() + (result - teacher).square().mean()

    x, y, teacher = torch.randn(3, 6, 4).unbind()
    for batch in ((x, y, teacher), (x, (y, teacher))):
        with pytest.raises(CaptureError, match=r"distill\(.*teacher.*\) -> .* target: let it take these two, with a tuple"):
            capture(nn.Linear(4, 4), batch, loss_fn=distill)
    capture(nn.Linear(4, 4), (x, (y, teacher)), loss_fn=lambda result, target: distill(result, *target))


def test_a_loss_beside_an_optional_argument_says_how_it_is_passed() -> None:
    class Optional(nn.Linear):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x if y is None else x + y)

    batch = torch.randn(6, 4), torch.randn(6, 4)
    with pytest.raises(CaptureError, match=r"'target'; loss_fn takes .* as target, .*: dict\(x=\.\.\., target=\.\.\.\)$"):
        capture(Optional(4, 4), batch, loss_fn=nn.functional.mse_loss)
    capture(Optional(4, 4), (), {"x": batch[0], "target": batch[1]}, loss_fn=nn.functional.mse_loss)


def test_a_result_without_tensors() -> None:
    class Nothing(nn.Linear):
        def forward(self, x: Tensor) -> None:  # type: ignore[override]
            super().forward(x)

    with pytest.raises(CaptureError, match="NoneType without a tensor"):
        capture(Nothing(4, 4), (torch.randn(6, 4),))


class Doubles(nn.Module):
    """An argument that transformers' models have too, with another meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        h = self.inner(x)
        return (h * 2 if use_cache else h).sum()


@pytest.mark.parametrize("arguments", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
def test_use_cache_of_other_models_is_their_own(arguments: dict[str, bool]) -> None:
    """It was False whatever the call said."""
    model, x = Doubles(), torch.randn(2, 4)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss, _ = loss_and_gradients(capture(model, (x,), arguments), state, {"x": x})
    assert loss == pytest.approx(model(x, **arguments).item(), rel=1e-5)


@pytest.mark.parametrize("more", [{"output_hidden_states": True}, {"output_hidden_states": True, "use_cache": True}], ids=str)
def test_tuples_without_their_cache_are_refused(more: dict[str, bool]) -> None:
    """What comes after the cache had its place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    model, tokens = LlamaForCausalLM(config), torch.zeros(2, 4, dtype=torch.long)
    batch = {"input_ids": tokens, "labels": tokens, "return_dict": False}
    with pytest.raises(CaptureError, match="pass return_dict=True, or use_cache=False"):
        capture(model, (), batch | more)
    capture(model, (), batch | more | {"use_cache": False})
    capture(model, (), batch)
