"""Buffers that a forward writes: in place, in slices, and by assignment, in training and in evaluation, equal to one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.harness.comparison import same_gradients, same_state
from support.harness.rank_pool import RankPool
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import overwritten_values
from autopar.errors import AutoparError, CaptureError, PlanError
from autopar.ir.plan import Precision


class Buffers(nn.Module):
    """A linear, and buffers that `run` writes and reads."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.run, self.linear, self.norm = RUNS[name], nn.Linear(8, 8), nn.BatchNorm1d(8)
        for name in ("before", "now"):
            self.register_buffer(name, torch.linspace(0.0, 1.0, 8))
        self.register_buffer("queue", torch.linspace(-1.0, 1.0, 48).view(8, 6))
        self.register_buffer("last", torch.ones(8, 8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x, self.linear(x)).mean()


def average(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    model.now = 0.9 * model.now + 0.1 * y.detach().mean(0)
    return y * model.now


def shifted(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    model.before, model.now = model.now, y.detach().mean(0)
    return y * model.before + y.square() * model.now


def shifted_in_place(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    model.before.copy_(model.now)
    model.now.copy_(y.detach().mean(0))
    return y * model.before + model.now


def exchanged(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    model.before, model.now = model.now, model.before + 1
    return y * model.before + y.square() * model.now


def queue(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    """As MoCo: logits of the keys of before."""
    logits = y @ model.queue.clone()
    with torch.no_grad():
        model.queue[:, :2] = y[:2].T
        model.queue[:, 2:] *= 0.5
    return logits.square()


def row(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    result = y * model.queue[:, 1].clone()
    model.queue[3] = y.detach().mean()
    return result


def batch_of_before(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    result = y * model.last.clone()
    model.last.copy_(x)
    return result


def count(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    """Evaluation counts too."""
    model.steps += 1
    return model.norm(y) * (model.steps / 10).clamp(max=1)


def slice_of_before(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    """Read under no_grad first, after its tensor was written: gradients flow through it all the same."""
    z = y * 2
    first, rest = z[:, 0], z[:, 1:]
    z[:, 1:] += 1.0
    with torch.no_grad():
        scale = rest.abs().mean() + first.abs().mean()
    return (rest / scale).square() + first.unsqueeze(1)


def masked(model: Buffers, x: Tensor, y: Tensor) -> Tensor:
    """A mask, which a backward may compute again."""
    result = torch.where(model.now > 0.3, y, -y)
    model.now = y.detach().mean(0)
    return result


RUNS: dict[str, Callable[[Buffers, Tensor, Tensor], Tensor]] = {
    each.__name__: each
    for each in (average, shifted, shifted_in_place, exchanged, queue, row, batch_of_before, count, slice_of_before, masked)
}


def batch(seed: int) -> Tensor:
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def train_all(degrees: str) -> None:
    """On a rank: each model, for three steps, an evaluation and one more step."""
    for name in RUNS:
        torch.manual_seed(0)
        plain = Buffers(name).double()
        parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (batch(0),), force=degrees, cache=False)
        pairs = [(model, torch.optim.SGD(model.parameters(), 0.1)) for model in (plain, parallel)]
        for seed, trains in enumerate((True, True, True, False, True)):
            losses = []
            for model, _ in pairs:
                model.train(trains)
                with torch.set_grad_enabled(trains):
                    losses.append(model(batch(seed)))
                if trains:
                    losses[-1].backward()
            assert abs(losses[1].item() - losses[0].item()) < 1e-11, name
            if trains:
                same_gradients(parallel, plain)
            for _, optimizer in pairs:
                optimizer.step()
                optimizer.zero_grad()
            same_state(parallel, plain)


@pytest.mark.parametrize("force", ["dp=2,zero=0", "tp=2,dp=1"])
def test_equals_one_process(force: str, ranks: RankPool) -> None:
    ranks.run(train_all, force, world=2, timeout=240)


class Shared(nn.Module):
    """A buffer that is a row of another one."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.linear, self.assigns = nn.Linear(8, 8), assigns
        self.register_buffer("rows", torch.ones(2, 8))
        self.register_buffer("row", self.rows[1])

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.rows = self.linear.weight.detach()
        else:
            self.rows += 1
        return (self.linear(x) * self.row).sum()


@pytest.mark.parametrize(
    ("assigns", "said"), [(True, r"assigns torch.float32 \[8, 8\] to the buffer rows"), (False, "row shares")]
)
def test_what_a_program_would_not_write_is_refused(assigns: bool, said: str) -> None:
    with pytest.raises(CaptureError, match=said):
        capture(Shared(assigns), (torch.rand(4, 8),), {})


def test_a_mask_is_of_the_copy_of_its_buffer() -> None:
    (block,) = capture(Buffers("masked"), (torch.rand(8, 8),), {}).blocks
    found = {node.outputs[0].name: node for node in block.nodes}
    (compare,) = (node for node in block.nodes if node.op.startswith("aten.gt"))
    copy = found[compare.operands()[0]]
    assert (copy.op, copy.operands()) == ("aten.clone", ("now",)) and "now" in overwritten_values(block)


def test_buffers_may_lie_side_by_side_in_one_memory() -> None:
    """As a state dict that was saved as one tensor is loaded with ``assign=True``."""
    model, flat = Buffers("shifted"), torch.zeros(16)
    model.before, model.now = flat[:8], flat[8:]
    updates = [update for block in capture(model, (torch.rand(8, 8),), {}).blocks for update in block.updates]
    assert {buffer for buffer, _ in updates} == {"before", "now"}


class Averaged(nn.Module):
    """A layer whose loss reads what it assigns to afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("now", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        result = x + y * self.now
        self.now = 0.9 * self.now + 0.1 * y.detach().mean(0)
        return result


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Averaged() for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_old_values_are_not_recomputed() -> None:
    """They are other ones in the backward: a plan that needs them is refused."""
    graph = capture(Stack().double(), (batch(0),), {})
    layers = [block for block in graph.blocks if block.updates]
    assert sum(graph.count(block.name) for block in layers) == 3 and all(overwritten_values(block) for block in layers)
    plain = drawn_candidate(graph, mesh_of(dp=2), 0, zero=0, wild=0.0, precision=Precision("float64", "float64"))
    evaluate(graph, plain, Cluster.parse("local:2"))
    whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    with pytest.raises(PlanError, match="the backward uses now as 'R', which is not saved"):
        evaluate(graph, whole, Cluster.parse("local:2"))


class Counting(nn.Module):
    """Equal layers, and a counter; with `late` the loss reads what it was before."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.layers, self.late = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), late
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        before = self.steps
        if self.training:
            self.steps = self.steps + 1
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean() * (before if self.late else 1)


def count_in_a_pipeline() -> None:
    torch.manual_seed(0)
    plain = Counting(late=False).double()
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (batch(0),), force="pp=2,micro=8", cache=False)
    for seed in range(2):
        for model in (parallel, plain):
            model(batch(seed)).backward()
        same_gradients(parallel, plain)
    parallel.eval()
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(batch(2)), plain(batch(2)), rtol=1e-9, atol=1e-11)
    same_state(parallel, plain)
    assert plain.steps == 2


def test_counters_do_not_keep_pipelines_away(ranks: RankPool) -> None:
    """The write of a counter kept every cut away: the model had one block, and no pipeline."""
    ranks.run(count_in_a_pipeline, world=2)
    with pytest.raises(AutoparError, match=r"updates the buffer steps once a forward.*a training loop can count instead.*pp=1"):
        autopar.plan(Counting(late=False).double(), "local:2", (batch(0),), force="pp=2,micro=2", cache=False)
    with pytest.raises(PlanError, match=r"has 1 blocks \(none ends between the write of the buffer steps and what reads it\)"):
        autopar.plan(Counting(late=True).double(), "local:2", (batch(0),), force="pp=2,micro=8", cache=False)


class Layer(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.linear(x))


class Around(nn.Module):
    """Equal layers between what is written and what reads it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.run, self.first = AROUND[name], nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("steps", torch.zeros(()))
        for name in ("before", "now"):
            self.register_buffer(name, torch.linspace(0.0, 1.0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def old_count(model: Around, x: Tensor) -> Tensor:
    old = model.steps.clone()
    model.steps += 1
    return model.through(x).square().mean() * (old + 1)


def old_average(model: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        old = model.now.clone()
        model.now.mul_(0.9).add_(x.mean(0) * 0.1)
    return (model.through(x) - old).square().mean()


def old_average_of_copy(model: Around, x: Tensor) -> Tensor:
    """The new value reads nothing of the old one."""
    old = model.now[2:4] * 1
    with torch.no_grad():
        model.now.copy_(model.first(x).mean(0))
    return (model.through(x)[:, 2:4] - old).square().mean()


def old_calls(model: Around, x: Tensor) -> Tensor:
    old = model.layers[1].calls * 1
    return model.through(x).square().mean() * (old + 1)


def shift(model: Around, x: Tensor) -> Tensor:
    model.before, model.now = model.now, model.first(x).detach().mean(0)
    return (model.through(x) - model.before + 2 * model.now).square().mean()


def swap(model: Around, x: Tensor) -> Tensor:
    model.before, model.now = model.now, model.before + x.mean(0)
    return (model.through(x * model.now) - model.before + 2 * model.now).square().mean()


def new_count(model: Around, x: Tensor) -> Tensor:
    model.steps += 1
    return model.through(x * model.steps).square().mean() * model.steps


def new_average(model: Around, x: Tensor) -> Tensor:
    model.now = 0.9 * model.now + x.mean(0)
    return (model.through(x) - model.now).square().mean()


def new_calls(model: Around, x: Tensor) -> Tensor:
    return model.through(x).square().mean() * model.layers[0].calls


AROUND: dict[str, Callable[[Around, Tensor], Tensor]] = {
    each.__name__: each
    for each in (old_count, old_average, old_average_of_copy, old_calls, shift, swap, new_count, new_average, new_calls)
}


def train_around_layers(degrees: str) -> None:
    """On a rank: each model, for three steps and an evaluation."""
    for name in AROUND:
        torch.manual_seed(0)
        plain = Around(name).double()
        parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (batch(0),), force=degrees, cache=False)
        for seed in range(3):
            losses = [model(batch(seed)) for model in (parallel, plain)]
            assert abs(losses[0].item() - losses[1].item()) < 1e-11, name
            for loss in losses:
                loss.backward()
            same_gradients(parallel, plain)
        with torch.no_grad():
            found, expected = (model.eval()(batch(3)) for model in (parallel, plain))
        assert abs(found.item() - expected.item()) < 1e-11, name
        same_state(parallel, plain)


@pytest.mark.parametrize("degrees", ["dp=2,zero=3", "tp=2,dp=1", "pp=2,micro=8"])
def test_old_and_new_values_are_read_after_the_layers(degrees: str, ranks: RankPool) -> None:
    """The old value was the new one where a block after the layers read it, and a new one ended in a KeyError there."""
    ranks.run(train_around_layers, degrees, world=2, timeout=280)


class Returning(nn.Module):
    """A model that returns a row of a buffer, as it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("rows", torch.ones(2, 8, dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        row = self.rows[1].clone()
        self.rows = self.rows + 1
        return self.linear(x).square().mean(), row


def test_a_row_of_before_is_returned_as_a_copy() -> None:
    graph = capture(Returning(), (torch.rand(8, 8),), {})
    (block,) = graph.blocks
    makers = {node.name: node for node in block.nodes}
    returned = dict(zip(graph.calls[0].outputs, block.outputs, strict=True))[graph.outputs[-1].value]
    assert makers[returned].op == "aten.clone"
