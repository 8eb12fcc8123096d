"""`autopar.opaque`: control flow that depends on data, left whole in one submodule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import Training, parallel_model, sgd, train
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError
from autopar.ops.opaque import whole_modules
from autopar.passes.lower import lower
from autopar.planning import make_plan
from autopar.program.build import program_text
from autopar.program.export import export_program

WIDTH = 16


class Gate(nn.Module):
    """Branches on its data in Python."""

    def __init__(self, batchwise: bool = False) -> None:
        super().__init__()
        self.yes, self.no = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batchwise = batchwise

    def forward(self, x: Tensor) -> Tensor:
        if self.batchwise:
            return torch.stack([self.yes(row) if row.sum() > 0 else self.no(row) for row in x])
        if x.sum() > 0:
            return self.yes(x).tanh()
        return self.no(x).sigmoid()


class Net(nn.Module):
    def __init__(self, batchwise: bool, whole: bool = True) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, WIDTH), Gate(batchwise), nn.Linear(WIDTH, WIDTH)
        if whole:
            autopar.opaque(self.gate, batchwise=batchwise)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.gate(self.up(x)))).square().mean()


def net(batchwise: bool, whole: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return Net(batchwise, whole).double()


def batch() -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stepped(model: nn.Module, x: Tensor) -> Training:
    return train(model, [((sign * x,), {}) for sign in (1, -1, 1)], sgd())


def on_rank(text: str, batchwise: bool, x: Tensor) -> Training:
    model = net(batchwise)
    parallel = parallel_model(text, {name: p.detach().clone() for name, p in model.named_parameters()})
    parallel.program.mesh.opaque_modules = whole_modules(model)
    return stepped(parallel, x)


@pytest.mark.parametrize(
    ("batchwise", "force"),
    [
        (False, "dp=2,tp=2"),
        (True, "dp=2,tp=2"),
        pytest.param(False, "dp=4,zero=3", marks=pytest.mark.slow),
        pytest.param(True, "dp=4,zero=3", marks=pytest.mark.slow),
        pytest.param(True, "pp=2,dp=2,micro=2", marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(batchwise: bool, force: str, ranks: RankPool) -> None:
    model = net(batchwise)
    graph = capture(model, (batch(),))
    node = next(node for block in graph.blocks for node in block.nodes if node.op == "ap.opaque")
    plan = make_plan(model, "local:4", (batch(),), force=force, graph=graph)
    text = program_text(plan.graph, plan.candidate)
    assert "C.opaque(" in text and node.args[1] == "gate"
    at = {each.node: each for block in plan.candidate.blocks for each in block.nodes}[node.name]
    assert any("S(0)" in str(where) for where in at.results[0]) == (batchwise and "dp" in force)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    losses = stepped(model, batch()).losses
    assert not any(torch.equal(before[name], parameter) for name, parameter in model.named_parameters()), "a branch never ran"
    for found, _, state in ranks.run(on_rank, text, batchwise, batch()):
        assert found == pytest.approx(losses, rel=1e-9, abs=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_names_and_values_of_the_model_stay() -> None:
    plain, whole = net(False, whole=False), net(False)
    assert list(plain.state_dict()) == list(whole.state_dict())
    assert torch.equal(plain(batch()), whole(batch()))


def test_the_refusal_names_the_region_and_this_remedy() -> None:
    said = r"test_opaque.py:\d+ \(module gate\): control flow .* whole: autopar.opaque\(module\)"
    with pytest.raises(CaptureError, match=said) as caught:
        capture(net(False, whole=False), (batch(),))
    assert "\n" not in str(caught.value)


def test_an_export_is_refused(tmp_path: Path) -> None:
    plan = make_plan(net(False), "local:2", (batch(),), force="dp=2")
    with pytest.raises(AutoparError, match="autopar.opaque left whole: an exported folder cannot hold its code") as caught:
        export_program(lower(plan.graph, plan.candidate), plan.to_json(), tmp_path / "out")
    assert "\n" not in str(caught.value)


class Noisy(Gate):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand_like(x)


class Counting(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x)


class Lists(Gate):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x[0])


@pytest.mark.parametrize(
    ("gate", "call", "said"),
    [
        (Noisy, lambda gate, x: gate(x), "opaque test_opaque.Noisy draws random numbers"),
        (Counting, lambda gate, x: gate(x), "writes to its arguments or buffers"),
        (Lists, lambda gate, x: gate([x]), "gets a list as .*: pass tensors"),
    ],
)
def test_what_ranks_could_not_repeat_is_refused(
    gate: Callable[[], nn.Module], call: Callable[[nn.Module, Tensor], Tensor], said: str
) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = autopar.opaque(gate())

        def forward(self, x: Tensor) -> Tensor:
            return call(self.gate, x).sum()

    with pytest.raises(AutoparError, match=said) as caught:
        capture(Around(), (torch.randn(4, WIDTH),))
    assert "\n" not in str(caught.value)
