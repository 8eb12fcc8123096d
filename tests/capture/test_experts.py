"""Mixtures of experts are captured as one operation each, from unmodified models and from calls of the operator."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.comparison import NOISE, different_tensors
from support.harness.end_to_end import prepare
from support.models.routed_mlp import RoutedMlp, routed_batch
from support.models.small_models import routed_cases
from support.oracles.experts_by_loop import by_loop, example, random_gradients
from support.oracles.interpret_graph import loss_and_gradients
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError, OperatorError
from autopar.ir.graph import Graph, Node

HUGGING_FACE = {
    "mixtral": ("silu", "halves"),
    "qwen3_moe": ("silu", "halves"),
    "deepseek_v3": ("silu", "halves"),
    "gpt_oss": ("swiglu_clamped(1.702,7.0)", "interleaved transposed"),
}


def experts_of(graph: Graph) -> list[Node]:
    return [node for block in graph.blocks for node in block.nodes if node.op == "ap.moe_experts"]


LATER = ("qwen3_moe", "deepseek_v3")  # whose programs are compared with one process


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in LATER else ()) for each in (*HUGGING_FACE, *routed_cases())]
)
def test_equals_eager(name: str) -> None:
    prepared = prepare(name)
    loss, found = loss_and_gradients(prepared.graph, prepared.state, prepared.batch)
    assert loss == pytest.approx(prepared.expected.loss, rel=1e-10)
    assert not different_tensors("gradient", found, prepared.expected.gradients, 1e-9, noise=NOISE)


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_layers_of_experts_are_one_operation(name: str) -> None:
    graph = prepare(name).graph
    (node,) = experts_of(graph)
    assert node.args[7:] == (*HUGGING_FACE[name], None)
    assert graph.batch_is_symbolic and not any("grouped_mm" in each.op for block in graph.blocks for each in block.nodes)


def test_the_model_and_the_library_are_as_before() -> None:
    model = Mixture("silu")
    moe = sys.modules["transformers.integrations.moe"]
    before = copy.copy(vars(model.experts.config)), set(moe.ALL_EXPERTS_FUNCTIONS.keys())
    capture(model, (), {"x": torch.randn(4, 8)})
    assert (vars(model.experts.config), set(moe.ALL_EXPERTS_FUNCTIONS.keys())) == before


class Mixture(nn.Module):
    """The library's experts between a gate and a sum."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        from transformers.models.mixtral.configuration_mixtral import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4, hidden_act=activation)
        self.gate, self.experts = nn.Linear(8, 4), MixtralExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return self.experts(x, chosen, weights).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu2", "relu2"),
        ("quick_gelu", "gelu_quick"),
        ("linear", "identity"),
    ],
)
def test_activations_are_found_by_what_they_compute(name: str, activation: str) -> None:
    (node,) = experts_of(capture(Mixture(name), (), {"x": torch.randn(4, 8)}))
    assert node.args[7] == activation


def test_an_unknown_gate_is_refused() -> None:
    model = Mixture("silu")
    model.experts.act_fn = nn.Softsign()
    with pytest.raises(CaptureError, match=r"module experts \(MixtralExperts\).*activation.*autopar\.ops\.moe_experts"):
        capture(model, (), {"x": torch.randn(4, 8)})


class Loop(nn.Module):
    """Experts one after another, each with the tokens that chose it."""

    def __init__(self, mix: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.mix = nn.Linear(8, 4), mix
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        return self.mix(self.experts, x, weights, chosen)


def by_where(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows, k = torch.where(chosen == number)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, k, None])
    return out


def by_hits(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    mask = F.one_hot(chosen, 4).permute(2, 1, 0)
    for number in (mask.sum((-1, -2)) > 0).nonzero():
        k, rows = torch.where(mask[number[0]])
        out = out.index_add(0, rows, experts[int(number)](x[rows]) * weights[rows, k, None])
    return out


def by_masks(experts: Any, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = (chosen == number).any(-1)
        if rows.any():
            out[rows] += expert(x[rows])
    return out


class Net(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.mixture = mixture

    def forward(self, x: Tensor) -> Tensor:
        return self.mixture(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mix", [by_where, by_hits, by_masks])
def test_a_loop_over_experts_is_refused(mix: Callable[..., Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"test_experts\.py:\d+.*data of a tensor.*autopar\.ops\.moe_experts") as caught:
        capture(Net(Loop(mix)), (), {"x": torch.randn(12, 8)})
    assert "\n" not in str(caught.value) and "module mixture" in str(caught.value)


# -- the operator


def test_the_operator_is_plain_pytorch() -> None:
    given = example(layout="interleaved transposed").leaves()
    other = example(layout="interleaved transposed").leaves()
    found = autopar.ops.moe_experts(*given[:7], layout="interleaved transposed")
    expected = by_loop(other)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(random_gradients(found, given), random_gradients(expected, other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("capacity", [None, 0.75])
def test_the_operator_in_an_exported_program(capacity: float | None) -> None:
    """One operation, which trains."""
    torch.manual_seed(0)
    model, batch = RoutedMlp(capacity), routed_batch(2)
    expected = model(**batch)
    expected.backward()
    trained = {name: parameter.grad for name, parameter in model.named_parameters()}
    program = torch.export.export(model, (), batch, strict=False)
    called = [str(node.target) for node in program.graph.nodes if str(node.target).startswith("ap.")]
    assert called == ["ap.expert_capacity.default"] * (capacity is not None) + ["ap.moe_experts.default"]
    model.zero_grad()
    exported = program.module()
    found = exported(**batch)
    found.backward()
    torch.testing.assert_close(found, expected)
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, trained[name])


def test_the_operator_under_compile() -> None:
    """The graph breaks there."""
    torch.manual_seed(0)
    model, batch = RoutedMlp(), routed_batch(2)
    expected = model(**batch)
    expected.backward()
    trained = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    found = torch.compile(model, backend="aot_eager")(**batch)
    found.backward()
    torch.testing.assert_close(found, expected)
    for parameter, gradient in zip(model.parameters(), trained, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "top-k": ({"experts": torch.zeros(3, 5, 5, dtype=torch.int64), "weights": torch.zeros(3, 5, 5)}, "5 experts of each"),
    "dtype": ({"experts": torch.zeros(3, 5, 2)}, "int64"),
    "weights": ({"weights": torch.zeros(3, 5, 3)}, r"weights \[3, 5, 3\]"),
    "tokens": ({"x": torch.zeros(3, 4, 8)}, r"x is \[3, 4, 8\]"),
    "width": ({"x": torch.zeros(3, 5, 7)}, r"pass up \[E, 2 F, H\] and down \[E, H, F\]"),
    "layout": ({"layout": "halves transposed"}, r"pass up \[E, H, 2 F\] and down \[E, F, H\]"),
    "plain": ({"layout": "plain"}, r"pass up \[E, F, H\] and down \[E, H, F\]"),
    "rank": ({"up": torch.zeros(12, 8)}, "one matrix for each expert"),
    "experts": ({"down": torch.zeros(3, 8, 6)}, "do not fit"),
    "bias": ({"up_bias": torch.zeros(4, 6)}, r"up_bias is \[4, 6\], not \[4, 12\]"),
    "activation": ({"activation": "softmax"}, "unknown activation 'softmax'"),
    "layout word": ({"layout": "thirds"}, "unknown layout 'thirds'"),
    "capacity": ({"capacity": 0.0}, "capacity 0.0 is not above 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_told(what: str) -> None:
    changed, text = WRONG[what]
    arguments = {**example(dtype=torch.float32)._asdict(), **changed}
    with pytest.raises(OperatorError, match=text) as caught:
        autopar.ops.moe_experts(**arguments)
    assert "\n" not in str(caught.value)


def test_wrong_arguments_in_a_model_name_the_line() -> None:
    with pytest.raises(CaptureError, match=r"routed_mlp\.py:\d+.*: moe_experts: 5 experts of each token, but there are 4"):
        capture(FewExperts(), (), routed_batch(4))


class FewExperts(RoutedMlp):
    """Routes to more experts than there are."""

    def __init__(self) -> None:
        super().__init__(k=5)
        self.gate = nn.Linear(16, 6)
