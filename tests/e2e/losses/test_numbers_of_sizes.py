"""Numbers that a forward computes of the batch size (``1 / x.shape[0]``), at any batch, on any plan, in any argument."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import full_gradients
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import program_text, prove_program

TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a term of the loss": lambda h, y: ((h - y) ** 2).mean() + (1.0 / h.shape[0]) * h.pow(2).sum(),
    "a number": lambda h, y: ((h - y) ** 2).mean() + 3.7 * h.shape[0] / 3,
    "a temperature": lambda h, y: ((h / (0.1 + 1 / h.shape[0])).softmax(-1) * y).mean(),
    "an argument": lambda h, y: (h.clamp(max=h.shape[0] / 16) + torch.full((12,), y.shape[0] / 7) - y).pow(2).mean(),
    "a factor": lambda h, y: torch.add(h, y, alpha=h.shape[0] - 1).pow(2).mean() + torch.sub(h, y, alpha=1 / h.shape[0]).sum(),
    "a whole number": lambda h, y: (h * (h.shape[0] * 1.0) - y / (y.shape[1] * 1.0)).pow(2).mean(),
    "filters of each example": lambda h, y: (
        F.conv1d(h.view(1, -1, 6), y[:, :6].reshape(-1, 1, 3), padding=1, groups=2 * h.shape[0]).square().mean()
        + F.conv_transpose1d(h.view(-1, 3), y[:, :8].reshape(-1, 2, 1), groups=h.shape[0]).square().mean()
    ),
    "a constant of an operation": lambda h, y: (
        F.smooth_l1_loss(h, y, beta=2 / h.shape[0]) + F.layer_norm(h, (12,), eps=1 / h.shape[0]).sum()
    ),
}


class Net(nn.Module):
    def __init__(self, term: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12, dtype=torch.float64) for _ in range(4))
        self.term = term

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return TERMS[self.term](x, y)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    return tuple(torch.randn(size, 12, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[return-value]


def train_on_ranks(term: str, degrees: str) -> None:
    torch.manual_seed(0)
    plain = Net(term)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", batch(8), force=degrees, cache=False)
    for size in (8, 4, 8, 6) if "micro" in degrees else (8, 6, 5):
        loss, expected = parallel(*batch(size)), plain(*batch(size))
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(full_gradients(parallel), full_gradients(plain), rtol=1e-9, atol=1e-9)
        parallel.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("degrees", ["dp=2,zero=3", "dp=2,micro=2", "dp=1,pp=2,micro=2"])
def test_equals_one_process(ranks: RankPool, degrees: str) -> None:
    whole = () if degrees == "dp=2,zero=3" else ("a constant of an operation",)  # of the whole batch: it is refused
    for term in TERMS:
        if term not in whole:
            ranks.run(train_on_ranks, term, degrees, world=2)


@pytest.mark.parametrize("term", ["a term of the loss", "an argument", "a factor", "a whole number", "filters of each example"])
def test_a_plan_file_keeps_them(term: str) -> None:
    plan = autopar.plan(Net(term), "local:2", batch(8), force="dp=2,micro=2", cache=False)
    again = Plan.from_json(plan.to_json())
    assert program_text(again.graph, again.candidate) == program_text(plan.graph, plan.candidate)
    assert (certificate := prove_program(again)).holds, certificate.line()


FIXED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    r"without int\(\)": (lambda h, y: h * int(h.shape[0]), lambda h, y: h * h.shape[0]),
    "at once in place of a loop": (lambda h, y: torch.stack([row * 2 for row in h]), lambda h, y: h * 2),
    "as inputs": (lambda h, y: h * torch.linspace(0, 1, h.shape[0], dtype=h.dtype)[:, None], lambda h, y: h * y),
}
"""What fixes the batch, and what the line says to write in its place."""


@pytest.mark.parametrize("remedy", FIXED)
def test_what_fixes_the_batch_is_said_with_its_remedy(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written, instead = (lambda h, y, each=each: each(h, y).pow(2).mean() for each in FIXED[remedy])
    monkeypatch.setitem(TERMS, "fixed", written)
    with pytest.raises(autopar.AutoparError, match=rf"becomes a number at test_numbers_of_sizes.py:\d+: .*{remedy}"):
        autopar.plan(Net("fixed"), "local:2", batch(8), force="dp=1,pp=2,micro=2", cache=False)
    monkeypatch.setitem(TERMS, "fixed", instead)
    autopar.plan(Net("fixed"), "local:2", batch(8), force="dp=1,pp=2,micro=2", cache=False)


def test_a_quotient_by_the_batch_is_no_size() -> None:
    """As files had them that were saved when such numbers were floored."""
    text = autopar.plan(Net("a term of the loss"), "local:2", batch(8), force="dp=2", cache=False).to_json()
    assert '"real"' in text
    with pytest.raises(autopar.AutoparError, match="1/B is no size.*plan the model again"):
        Plan.from_json(text.replace('"real"', '"size"'))
