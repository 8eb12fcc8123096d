"""`torch.cond` and `while_loop`: planned, and equal to one process in losses, gradients and updated parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import Training, parallel_model, sgd, train
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan_file.plan_file import Plan
from autopar.ir.regions import inner_nodes, read_region, region_arg, regions_of
from autopar.passes.lower import lower
from autopar.planning import make_plan
from autopar.program.build import program_text
from autopar.program.export import export_program

WIDTH = 16
Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """`captured` calls torch's operators; else `forward` is what they mean, in Python."""

    def __init__(self, name: str, captured: bool) -> None:
        super().__init__()
        self.up, self.yes, self.no, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        dropout = {"recurrent": 0.0, "random": 0.5}.get(name)
        self.rnn = None if dropout is None else nn.LSTM(4, 4, 2, dropout=dropout)
        self.register_buffer("warm", torch.tensor(1.0))
        self.body = BODIES[name][0 if captured else 1]

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.body(self, self.up(x)))).square().mean()


def _choose(predicate: Tensor, yes: Callable[[Tensor], Tensor], no: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return yes(x) if predicate else no(x)


def _cond(predicate: Tensor, yes: Callable[[Tensor], Tensor], no: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    found: Tensor = torch.cond(predicate, yes, no, (x,))
    return found


Choose = Callable[[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]


def by_data(choose: Choose) -> Body:
    def no(net: Net, a: Tensor) -> Tensor:
        return net.no(a).sigmoid().reshape(-1, 4, 4).flatten(1)

    return lambda net, x: choose(x.sum() > 0, lambda a: net.yes(a).tanh(), lambda a: no(net, a), x)


def by_buffer(choose: Choose) -> Body:
    return lambda net, x: choose(net.warm > 0, lambda a: net.yes(a).tanh(), lambda a: a.sin(), x)


def of_the_batch(choose: Choose) -> Body:
    def yes(net: Net, a: Tensor) -> Tensor:
        return net.yes(a) - net.yes(a).mean(0)

    return lambda net, x: choose(x.sum() > 0, lambda a: yes(net, a), lambda a: a + net.no(a).sum(0, keepdim=True), x)


def nested(choose: Choose) -> Body:
    def yes(net: Net, a: Tensor) -> Tensor:
        return choose(a.mean() > 0.05, lambda b: net.yes(b).tanh(), lambda b: b * 2, a)

    return lambda net, x: choose(x.sum() > 0, lambda a: yes(net, a), lambda a: net.no(a), x)


def recurrent(choose: Choose) -> Body:
    def yes(net: Net, a: Tensor) -> Tensor:
        assert net.rnn is not None  # the function: torch refuses nn.LSTM in a branch, which writes attributes
        start = a.new_zeros(2, a.shape[0], 4)
        weights, dropout = [*net.rnn.parameters()], net.rnn.dropout
        steps = a.reshape(-1, 4, 4).transpose(0, 1)
        found = torch.lstm(steps, (start, start), weights, True, 2, dropout, True, False, False)[0]
        return found.transpose(0, 1).reshape(-1, WIDTH)

    return lambda net, x: choose(x.sum() > 0, lambda a: yes(net, a), lambda a: net.no(a), x)


def _loop(net: Net, x: Tensor) -> Tensor:
    start = torch.zeros((), dtype=torch.int64, device=x.device)
    found = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, net.yes(y).tanh()), (start, x))
    return found[1]


def _loop_in_python(net: Net, x: Tensor) -> Tensor:
    for _ in range(3):
        x = net.yes(x).tanh()
    return x


def _until(net: Net, x: Tensor) -> Tensor:
    found = while_loop(lambda y: y.abs().sum() > 20, lambda y: (net.yes(y).tanh() * 0.7,), (x,))
    return found[0]


def _until_in_python(net: Net, x: Tensor) -> Tensor:
    while x.abs().sum() > 20:
        x = net.yes(x).tanh() * 0.7
    return x


BODIES: dict[str, tuple[Body, Body, bool]] = {
    "by data": (by_data(_cond), by_data(_choose), True),
    "by a buffer": (by_buffer(_cond), by_buffer(_choose), True),
    "of the batch": (of_the_batch(_cond), of_the_batch(_choose), False),
    "nested": (nested(_cond), nested(_choose), False),
    "recurrent": (recurrent(_cond), recurrent(_choose), False),
    "loop": (_loop, _loop_in_python, True),
    "until": (_until, _until_in_python, False),
}
"""With torch's operators, in Python, and whether the data axis shards it."""


def net(name: str, captured: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(name, captured).double()


def batch() -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def stepped(model: nn.Module, x: Tensor) -> Training:
    return train(model, [((sign * x,), {}) for sign in (1, -1, 1)], sgd())


def on_rank(text: str, state: dict[str, Tensor], x: Tensor) -> Training:
    return stepped(parallel_model(text, state), x)


@cache
def graph_of(name: str) -> Graph:
    return capture(net(name), (batch(),))


@cache
def planned(name: str, cluster: str, force: str) -> Plan:
    return make_plan(net(name), cluster, (batch(),), force=force, graph=graph_of(name))


def branch(plan: Plan) -> Node:
    return next(node for block in plan.graph.blocks for node in block.nodes if node.op in ("ap.cond", "ap.while_loop"))


@pytest.mark.parametrize(
    ("name", "force"),
    [
        *((name, "dp=2,tp=2") for name in BODIES),
        *(pytest.param(name, "dp=4,zero=3", marks=pytest.mark.slow) for name in BODIES),
        *(pytest.param(name, "pp=2,dp=2,micro=2", marks=pytest.mark.slow) for name in ("by a buffer", "loop")),
    ],
)
def test_equals_one_process(name: str, force: str, ranks: RankPool) -> None:
    plan = Plan.from_json(planned(name, "local:4", force).to_json())
    text = program_text(plan.graph, plan.candidate)
    node = branch(plan)
    assert f"C.{node.op[3:]}(" in text
    at = {each.node: each for block in plan.candidate.blocks for each in block.nodes}[node.name]
    assert any("S(0)" in str(where) for where in at.results[-1]) == BODIES[name][2]
    model = net(name, captured=False)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    losses = stepped(model, batch()).losses
    for found, _, after in ranks.run(on_rank, text, state, batch()):
        assert found == pytest.approx(losses, rel=1e-9, abs=0)
        for key, parameter in model.named_parameters():
            assert key in after or parameter.grad is None, key  # what no branch reads is in no program
            if key in after:
                torch.testing.assert_close(after[key], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_both_branches_run() -> None:
    before = net("by data", captured=False)
    after = net("by data", captured=False)
    stepped(after, batch())
    for one, two in zip(before.parameters(), after.parameters(), strict=True):
        assert not torch.equal(one, two)


@pytest.mark.parametrize("name", list(BODIES))
def test_regions_are_read_back(name: str) -> None:
    graph = graph_of(name)
    node = next(node for block in graph.blocks for node in block.nodes if node.op in ("ap.cond", "ap.while_loop"))
    assert all(read_region(region_arg(region)) == region for region in regions_of(node))
    assert any(inner.op == "ap.cond" for inner in inner_nodes(node)) == (name == "nested")
    assert node.source.startswith("test_branches.py:")


def test_an_export_runs(tmp_path: Path) -> None:
    plan = planned("by data", "local:2", "dp=2")
    export_program(lower(plan.graph, plan.candidate), plan.to_json(), tmp_path / "out")
    assert "C.cond(" in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.py"))


def _refused(net: Net, x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda a: torch.dropout(a, 0.5, True), lambda a: a.sin(), (x,))
    return found


@pytest.mark.parametrize("body", [_refused, recurrent(_cond)])
def test_random_numbers_inside_of_a_branch_are_refused(body: Body, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BODIES, "random", (body, body, False))
    with pytest.raises(CaptureError, match=r"test_branches.py:\d+: torch.cond: aten\.\w+ draws random numbers") as caught:
        capture(net("random"), (batch(),))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("op", ["aten.from_file", "aten.add_.Tensor", "prims.add", "ap.opaque"])
def test_a_plan_with_another_operation_inside_is_refused(op: str) -> None:
    plan = planned("by data", "local:2", "dp=2")
    text = plan.to_json()
    crafted = text.replace('"aten.tanh"', f'"{op}"')
    assert crafted != text
    with pytest.raises(AutoparError) as caught:
        crafted_plan = Plan.from_json(crafted)
        program_text(crafted_plan.graph, crafted_plan.candidate)
    assert "\n" not in str(caught.value)
