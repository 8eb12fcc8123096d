"""What `parallel(...)` takes on real ranks: nested tensors, constants, None, defaults, shared tensors; and one line for what it
does not."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients, training_differences
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError


class Net(nn.Module):
    """Takes tensors in containers, one that does not follow the batch, one without dimensions, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(
        self, x: Tensor, pairs: Any, extra: dict[str, Any], mask: Tensor | None = None, gain: float = 1.0, *,
        scale: Tensor, reduce: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        (first, second), third = pairs
        h = torch.relu(self.up(x + first * second)) * gain
        if mask is not None:
            h = h * mask[:, None]
        y = self.down(h) * extra["table"] + extra["deep"]["bias"] * third + more.get("shift", 0)
        return (y.square().mean() if reduce else y.square().sum()) * scale


def arguments(size: int = 8, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    pairs = [(draw(size, 16), draw(16)), draw(size, 1)]
    args = (draw(size, 16), pairs, {"table": draw(16), "deep": {"bias": draw(size, 16)}, "none": None})
    return args, {"scale": draw(), "reduce": True, "shift": draw(size, 16)}


@cache
def net() -> tuple[Net, Case]:
    torch.manual_seed(0)
    model = Net().double()
    args, keywords = arguments()
    return model, case_of(model, args, keywords)


def called(text: str, state: dict[str, Tensor], calls: list[Any], wrong: dict[str, Any]) -> Any:
    """On a rank: some steps of training; then what is wrong with each wrong call."""
    from autopar.runtime.errors import RuntimeProblem

    parallel = parallel_model(text, state)
    found, said = train(parallel, calls), {}
    for name, (args, keywords) in wrong.items():
        try:
            parallel(*args, **keywords)
            said[name] = "nothing"
        except RuntimeProblem as problem:
            said[name] = str(problem)
    return found, said


def wrong_calls() -> dict[str, tuple[Any, str]]:
    """A call, and what is said of it."""
    (x, pairs, extra), keywords = arguments()
    return {
        "a constant": (((x, pairs, extra), {**keywords, "reduce": False}), "reduce is False, the plan is for True"),
        "a constant left out": (((x, pairs, extra), {k: v for k, v in keywords.items() if k != "reduce"}), "misses reduce"),
        "a default": (((x, pairs, extra), {**keywords, "gain": 2.0}), "gain is 2.0, the plan is for 1.0"),
        "a tensor for None": (
            ((x, pairs, extra), {**keywords, "mask": x[:, 0]}),
            r"mask is a tensor of shape \(8,\), .* for None",
        ),
        "None for a tensor": (((None, pairs, extra), keywords), "misses x"),
        "none inside": (((x, pairs, {**extra, "table": None}), keywords), "misses extra.table"),
        "one missing": (((x, pairs), keywords), r"misses extra.table, extra.deep.bias"),
        "one more": (((x, pairs, extra), {**keywords, "other": x}), "unplanned other"),
        "one more inside": (((x, pairs, {**extra, "other": x}), keywords), "unplanned extra.other"),
        "too many": (((x, pairs, extra, None, 1.0, 2), keywords), "6 arguments by position, the model takes 5"),
        "twice": (((x, pairs, extra), {**keywords, "x": x}), "x is given by position and by name"),
        "a shape": (((x[:, :8], pairs, extra), keywords), r"input x has shape \(8, 8\), the plan is for \(batch, 16\)"),
        "a shape inside": (((x, [(x, x), pairs[1]], extra), keywords), r"input pairs.0.1 has shape \(8, 16\), .* for \(16\)"),
        "a dtype": (((x.float(), pairs, extra), keywords), "input x is float32, the plan is for float64"),
        "a word": ((("x", pairs, extra), keywords), "x is a str, the plan is for a tensor"),
        "another batch": (((x[:4], pairs, extra), keywords), "input pairs.0.0 has 8 examples, x has 4"),
        "an odd batch": (arguments(7), "does not divide over 2"),
    }


@pytest.mark.parametrize(
    "force", [{"dp": 2, "tp": 2, "micro": 2}, pytest.param({"pp": 2, "dp": 2, "micro": 2}, marks=pytest.mark.slow)], ids=str
)
def test_all_kinds_of_arguments(force: dict[str, int], ranks: RankPool) -> None:
    model, case = net()
    (x, pairs, extra), keywords = arguments(16, 1)
    calls = [
        arguments(),
        ((), {"x": x, "pairs": pairs, "extra": extra, "mask": None, "gain": 1.0, **keywords}),  # by name, defaults named
        arguments(8, 2),
    ]
    wrong = wrong_calls()
    only = {name: call for name, (call, _) in wrong.items()}
    found = ranks.run(called, case.text(**{"pp": 1, **force}), case.state, calls, only)
    fresh = Net().double()
    fresh.load_state_dict(model.state_dict())
    expected = train(fresh, calls)
    for mine, said in found:
        assert not training_differences(mine, expected)
        for name, (_, words) in wrong.items():
            assert "\n" not in said[name]
            assert re.search(words, said[name]), f"{name}: {said[name]}"


def test_the_batch_may_be_dimension_1() -> None:
    class Sequence(nn.Linear):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(super().forward(x).mean(0), target)

    graph = capture(Sequence(4, 4), (torch.randn(10, 6, 4), torch.randint(0, 4, (6,))))
    assert graph.batch == 6 and graph.batch_is_symbolic and graph.inputs[0].shape == ("B", 10, 4)


def test_complex_inputs_and_parameters_are_refused() -> None:
    class Wave(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(super().forward(x)).abs().sum()

    with pytest.raises(CaptureError, match=r"input x is torch.complex64: complex numbers"):
        capture(Wave(4, 4), (torch.randn(8, 4, dtype=torch.complex64),))
    with pytest.raises(
        CaptureError, match=r"weight is torch.complex64: keep it as pairs of real numbers, and call torch.view_as_complex"
    ):
        capture(Wave(4, 4, dtype=torch.complex64), (torch.randn(8, 4),))
    assert capture(Wave(4, 4), (torch.randn(8, 4),)).blocks  # what is complex in between only: tests/e2e/models/test_zoo.py


class Given(nn.Module):
    """Reads a weight of its own, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(x).tanh(), weight).square().mean()


def own_parameter(force: str) -> None:
    torch.manual_seed(0)
    plain, x = Given(), torch.randn(8, 6, dtype=torch.float64)
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:2", (x, torch.randn(6, 6).double()), force=force, cache=False)
    for weight in (lambda model: model.layer.weight, lambda model: model.layer.weight * 2):
        for model in (parallel, plain):
            model(x, weight(model)).backward()
    same_gradients(parallel, plain)


@pytest.mark.parametrize("force", ["dp=2,zero=3", "tp=2"])
def test_a_parameter_of_the_model_is_an_input(force: str, ranks: RankPool) -> None:
    """It ended in an error of DTensor: the parameter is sharded."""
    ranks.run(own_parameter, force, world=2)


class Unread(nn.Module):
    """Takes a number of each example that nothing reads, as loaders hand out, before what it does read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def unread_input(force: str) -> None:
    torch.manual_seed(0)
    plain, batch = Unread().double(), (torch.arange(8), torch.randn(8, 6, dtype=torch.float64))
    parallel = autopar.parallelize(copy.deepcopy(plain), "local:4", batch, force=force, cache=False, proof=True)
    for model in (parallel, plain):
        model(*batch).backward()
    same_gradients(parallel, plain)


@pytest.mark.parametrize("force", ["dp=4,micro=1", "pp=2,dp=2,micro=2"])
def test_an_input_that_nothing_reads(force: str, ranks: RankPool) -> None:
    """It was whole on every rank, whose first input says how many examples a micro-batch has."""
    ranks.run(unread_input, force)
