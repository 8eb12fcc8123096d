"""What cannot be derived is assumed, and says so at its line: operators with a user's rule, opaque modules, branches and loops,
where they are cut."""

from __future__ import annotations

import pytest
import torch
from e2e.control_flow import test_branches as branches
from torch import Tensor, nn
from verification import test_opaque as opaque

import autopar
from autopar.capture import capture
from autopar.checker.certificate import certify
from autopar.planning import make_plan
from autopar.program.build import program_text, prove_program

WIDTH = 16


@torch.library.custom_op("checker_tests::mix", mutates_args=())
def mix(x: Tensor, w: Tensor) -> Tensor:
    return x.sin() * w


@mix.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(x)


def _context(ctx: object, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)  # type: ignore[attr-defined]


def _backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors  # type: ignore[attr-defined]
    return gradient * x.cos() * w, (gradient * x.sin()).sum(0)


mix.register_autograd(_backward, setup_context=_context)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(mix(self.up(x), self.scale)).square().mean()


def test_an_operator_with_a_rule_of_a_user() -> None:
    autopar.register_rule("checker_tests::mix", "b d, d -> b d")
    plan = make_plan(Mixed(), "local:4", {"x": torch.randn(8, WIDTH)}, force="dp=2,tp=2")
    text = program_text(plan.graph, plan.candidate)
    found = certify(text, plan.graph, plan.candidate)
    assert found.holds, found.line()
    ((line, says),) = found.assumptions
    assert "checker_tests.mix" in text.splitlines()[line - 1] and "as its rule says" in says and "dp" in says
    assert f'"line": {line}' in found.to_json() and "1 lines assumed" in found.line()


@pytest.mark.parametrize("name", ["by data", "by a buffer", "loop", pytest.param("nested", marks=pytest.mark.slow)])
def test_branches_and_loops(name: str) -> None:
    model = branches.Net(name, captured=True)
    plan = make_plan(model, "local:4", {"x": torch.randn(8, branches.WIDTH)}, force="dp=4")
    found = prove_program(plan)
    assert found.holds, found.line()


def test_an_opaque_module_of_examples() -> None:
    model = opaque.Net(batchwise=True)
    graph = capture(model, (torch.randn(8, opaque.WIDTH),))
    plan = make_plan(model, "local:4", {"x": torch.randn(8, opaque.WIDTH)}, force="dp=4", graph=graph)
    found = prove_program(plan)
    assert found.holds, found.line()
    assert any("ap.opaque" in says for _, says in found.assumptions)
