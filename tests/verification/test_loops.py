"""`scan`, `map` and ``native_group_norm``, as export yields them; equal modules that `autopar.opaque` leaves whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import Training, parallel_model, sgd, train
from support.models.zoo.verified import verdict
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan

import autopar
from autopar.capture import capture
from autopar.capture.bind import bind_inputs
from autopar.errors import CaptureError
from autopar.ops.opaque import whole_modules
from autopar.planning import make_plan
from autopar.program.build import program_text
from autopar.verification.single import run_single

WIDTH = 16


class Recurrence(nn.Module):
    """A leaky state over the steps of dimension 1, and a gate of each step (which torch's eager `map` returns as a tuple)."""

    def __init__(self, gated: bool = True) -> None:
        super().__init__()
        self.gated = gated
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        last, every = scan(lambda state, y: (0.5 * state + torch.tanh(y), state * y), torch.zeros_like(h[:, 0]), h, dim=1)
        if not self.gated:
            return self.down(every + last.unsqueeze(1)).square().mean()
        gates = map_over(lambda y, weight: torch.sigmoid(y) * weight, h.transpose(0, 1), self.down.weight[0]).transpose(0, 1)
        return self.down(every * gates + last.unsqueeze(1)).square().mean()


class OverTheBatch(nn.Module):
    def __init__(self, loop: str) -> None:
        super().__init__()
        self.up, self.loop = nn.Linear(WIDTH, WIDTH), loop

    def forward(self, x: Tensor) -> Tensor:
        if self.loop == "map":
            return map_over(torch.tanh, self.up(x)).square().mean()
        return scan(lambda state, y: (state + y, state * y), torch.zeros(WIDTH), self.up(x))[1].square().mean()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h, norm = self.up(x), self.norm
        return torch.native_group_norm(h, norm.weight, norm.bias, h.shape[0], WIDTH, 1, 4, 1e-5)[0].sigmoid().mean()


def test_a_scan_and_a_map_are_written_out() -> None:
    graph = capture(Recurrence(), (torch.randn(8, 3, WIDTH),))
    found = [node.op for block in graph.blocks for node in block.nodes]
    assert graph.batch_is_symbolic and found.count("aten.tanh") == found.count("aten.sigmoid") == 3


@pytest.mark.slow
def test_a_scan_equals_one_process(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = Recurrence(gated=False).double()
    assert verdict(model, {"x": torch.randn(8, 4, WIDTH).double()}, "dp=2,tp=2", ranks) == "equal"


class Closure(nn.Module):
    """A loop or branch whose body reads parameters that are no operands of it, by torch's operator or written in Python."""

    def __init__(self, operator: str, written: bool = False, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.operator, self.written, self.dtype = operator, written, dtype

    def step(self, y: Tensor) -> Tensor:
        found = torch.tanh(self.inner(y))
        return found if self.dtype is None else found.to(self.dtype).sin().to(found.dtype)

    def inside(self, h: Tensor) -> Tensor:
        if self.operator == "map":
            over = h.transpose(0, 1)
            made = torch.stack([self.step(y) for y in over]) if self.written else map_over(self.step, over)
            return made.transpose(0, 1)
        if self.operator == "cond":
            other = lambda y: self.inner(y).sigmoid()  # noqa: E731
            if self.written:
                return self.step(h) if h.sum() > 0 else other(h)
            return torch.cond(h.sum() > 0, self.step, other, (h,))  # type: ignore[no-any-return]
        state, zero = h[:, 0] * 0.0, h[:, 0] * 0.0
        if not self.written:
            both, every = scan(lambda at, y: ((self.step(at[0] + y), at[1] + y), (at[0] * y, at[1] * y)), (state, zero), h, dim=1)
            return every[0] + every[1] + both[0].unsqueeze(1)
        rows = []
        for y in h.unbind(1):
            rows.append(state * y + zero * y)
            state, zero = self.step(state + y), zero + y
        return torch.stack(rows, 1) + state.unsqueeze(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.inside(self.up(x))).square().mean()  # type: ignore[no-any-return]


def closure(operator: str, written: bool = False, dtype: torch.dtype | None = None) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Closure(operator, written, dtype).double(), torch.randn(8, 3, WIDTH).double()


@pytest.mark.parametrize("operator", ["map", "scan", "cond"])
@pytest.mark.parametrize("lift", [False, True])
def test_the_reference_has_the_gradients_of_what_a_body_closes_over(operator: str, lift: bool) -> None:
    """With casts to float32 in the body, and these lifted."""
    model, x = closure(operator, dtype=torch.float32 if lift else None)
    found = run_single(model, bind_inputs(model, (x,), {}), {"x": x}, (), backward=True, lift=lift)
    written, _ = closure(operator, written=True, dtype=torch.float64 if lift else None)
    loss = written(x)
    loss.backward()
    torch.testing.assert_close(found.result["loss"], loss.detach(), rtol=1e-12, atol=0)
    for name, parameter in written.named_parameters():
        torch.testing.assert_close(found.result["gradients"][name], parameter.grad, rtol=1e-10, atol=1e-15)
    assert found.result["gradients"]["inner.weight"].norm() > 0


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["map", "scan", "cond"])
def test_a_loop_that_reads_parameters_verifies(operator: str, ranks: RankPool) -> None:
    model, x = closure(operator)
    assert verdict(model, {"x": x}, "dp=2", ranks) == "equal"


@pytest.mark.parametrize(("loop", "remedy"), [("map", "use torch.vmap"), ("scan", "scan along another dimension")])
def test_a_loop_over_the_batch_is_refused(loop: str, remedy: str) -> None:
    said = rf"^test_loops.py:\d+: {loop} along the batch cannot be captured: {remedy}$"
    with pytest.raises(CaptureError, match=said):
        capture(OverTheBatch(loop), (torch.randn(8, WIDTH),))


def test_a_long_loop_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"test_loops.py:\d+: scan of 3000 steps of \d+ operations .*autopar.opaque\(module\)$"
    ):
        capture(Recurrence(), (torch.randn(2, 3000, WIDTH),))


def test_native_group_norm_shards(ranks: RankPool) -> None:
    graph = capture(Norm(), (torch.randn(8, WIDTH),))
    assert [node.op for block in graph.blocks for node in block.nodes if "norm" in node.op] == ["aten.group_norm"]
    torch.manual_seed(0)
    assert verdict(Norm().double(), {"x": torch.randn(8, WIDTH).double()}, "dp=2,tp=2", ranks) == "equal"


class Gate(nn.Module):
    """Branches on its data in Python, at a level of its own."""

    def __init__(self, level: float = 0.0) -> None:
        super().__init__()
        self.yes, self.no, self.level = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), level

    def forward(self, x: Tensor) -> Tensor:
        return self.yes(x).tanh() if x.sum() > self.level else self.no(x).sigmoid()


class Layer(nn.Module):
    def __init__(self, level: float) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, WIDTH), autopar.opaque(Gate(level)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.gate(self.up(x)))  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self, depth: int, level: Callable[[int], float]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(level(number)) for number in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep(depth: int, level: Callable[[int], float] = lambda number: 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Deep(depth, level).double(), torch.randn(8, WIDTH).double()


@pytest.mark.parametrize("depth", [2, 8])
def test_equal_layers_with_opaque_parts_are_one_block(depth: int) -> None:
    model, x = deep(depth)
    graph = capture(model, (x,))
    inside = [block for block in graph.blocks if any(node.op == "ap.opaque" for node in block.nodes)]
    assert len(inside) == 1 and sum(call.block == inside[0].name for call in graph.calls) == depth


def test_opaque_parts_of_other_code_stay_apart() -> None:
    model, x = deep(4, lambda number: float(number % 2))
    paths = {node.args[1] for block in capture(model, (x,)).blocks for node in block.nodes if node.op == "ap.opaque"}
    assert paths == {"layers.0.gate", "layers.1.gate"}


def on_rank(text: str, depth: int, x: Tensor) -> Training:
    model, _ = deep(depth)
    parallel = parallel_model(text, {name: p.detach().clone() for name, p in model.named_parameters()})
    parallel.program.mesh.opaque_modules = whole_modules(model)
    return two_steps(parallel, x)


def two_steps(model: nn.Module, x: Tensor) -> Training:
    return train(model, [((sign * x,), {}) for sign in (1, -1)], sgd())


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=2,tp=2", "dp=4,zero=3"])
def test_folded_opaque_layers_equal_one_process(force: str, ranks: RankPool) -> None:
    model, x = deep(4)
    plan = make_plan(model, "local:4", (x,), force=force)
    losses = two_steps(model, x).losses
    text = program_text(plan.graph, plan.candidate)
    for found, _, state in ranks.run(on_rank, text, 4, x):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach(), rtol=1e-9, atol=1e-12)
