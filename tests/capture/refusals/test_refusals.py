"""What a graph cannot hold is one line with the user's file and line, never a graph of something else."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from support.oracles.interpret_graph import check_captured
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.state.draws import DrawRecord
from autopar.capture.state.reads import recorded_reads
from autopar.errors import CaptureError
from autopar.plan_inputs import check_model
from autopar.runtime.plain.code_reads import code_of
from autopar.runtime.plain.frozen_reads import FrozenReads


class Net(nn.Module):
    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.inner, x)


class Stateful(nn.Module):
    """`body` gets this module and the result of its linear layer."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(4, 4), body
        self.calls, self.longest, self.draws = 0, 0, random.Random(0)
        self.numbers = numpy.random.default_rng(0)
        self.draw, self.normal, self.count = random.gauss, partial(random.gauss, 0, 1), partial(numpy.random.randint, 1, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.inner(x)).sum()


def _counted(model: Any, x: Tensor) -> Tensor:
    model.calls += 1
    return x / model.calls


def _cached(model: Any, x: Tensor) -> Tensor:
    if x.shape[1] > model.longest:
        model.longest = 4
    return x


def _counted_in_a_forward(model: Any, x: Tensor) -> Tensor:
    model.calls = 1
    return _counted(model, x)


def _seeded(model: Any, x: Tensor) -> Tensor:
    numpy.random.seed(3)
    return x * float(numpy.random.permutation(5)[0])


FROZEN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a number": (lambda model, x: x * random.random(), "Python's random generator"),
    "as a tensor": (lambda model, x: x * torch.tensor(random.uniform(1, 2)), "random generator"),
    "an argument": (lambda model, x: F.dropout(x, numpy.random.rand()), "random generator"),
    "a choice": (lambda model, x: x * random.choice([1, 2]), "Python's random generator"),
    "an array": (lambda model, x: x * torch.tensor(numpy.random.rand(4)), "numpy's random generator"),
    "a branch": (lambda model, x: x if numpy.random.random() < 0.1 else 2 * x, "numpy's random generator"),
    "its own generator": (lambda model, x: x * model.draws.gauss(0, 1), "Random random generator"),
    "a generator of numpy": (lambda model, x: x * float(model.numbers.random()), "Generator random generator"),
    "a method of a generator": (lambda model, x: x * model.draw(0, 1), "Random random generator"),
    "a method with arguments": (lambda model, x: x * model.normal(), "Random random generator"),
    "a method of numpy": (lambda model, x: x * model.count(), "random generator"),
    "a counter": (_counted, "the forward counts in calls, which would be 1 for ever"),
    "a counter of one forward": (_counted_in_a_forward, ""),
    "a branch that is never taken": (lambda model, x: x if random.random() < 0.0 else 2 * x, ""),
    "a number that nobody uses": (lambda model, x: (random.random(), x)[1], ""),
    "a cache": (_cached, ""),
    "a seed": (_seeded, ""),
}
"""What Python computes in the forward, with the refusal; empty where a program is right."""


@pytest.mark.parametrize("name", FROZEN)
def test_what_python_computes_in_the_forward(name: str) -> None:
    body, line = FROZEN[name]
    model = Stateful(body)
    if line:
        with pytest.raises(CaptureError, match=line) as caught:
            capture(model, (torch.randn(3, 4),))
        place = f"test_refusals.py:{body.__code__.co_firstlineno if 'generator' in line else ''}"
        assert place in str(caught.value) and "Error:" not in str(caught.value)
    else:
        capture(model, (torch.randn(3, 4),))


def test_the_second_of_two_normal_numbers_is_a_draw() -> None:
    """Numpy draws two at once, and the state of its generator is the same after the second."""
    numpy.random.seed(0)
    numpy.random.normal()
    with pytest.raises(CaptureError, match="random generator"):
        capture(Stateful(lambda model, x: x * float(numpy.random.normal())), (torch.randn(3, 4),))


def test_a_draw_is_looked_for_at_calls_of_the_user_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare the states of generators at all the thousands of returns inside of torch took up to 7 s."""
    usual, looks = DrawRecord.advanced, list[int]()
    monkeypatch.setattr(DrawRecord, "advanced", lambda record: looks.append(1) or usual(record))
    with pytest.raises(CaptureError, match=f"test_refusals.py:{_deep.__code__.co_firstlineno + 2}"):
        capture(Stateful(_deep), (torch.randn(3, 4),))
    assert 2 < len(looks) < 200


def _deep(model: Any, x: Tensor) -> Tensor:
    x = F.layer_norm(F.gelu(F.layer_norm(x, (4,))), (4,)).softmax(-1)
    x = x * float(model.numbers.random())
    return F.layer_norm(x, (4,))


FACTOR = 2.0


class Settings:
    shift = 1.0


def _shifted(x: Tensor) -> Tensor:
    return x * FACTOR + Settings.shift


def test_what_the_code_of_a_forward_names() -> None:
    """Also of functions that it calls; not what only other methods read."""
    bias = 1.0
    code = code_of(Stateful(lambda model, x: _shifted(x) + bias))
    places = {each.place.rpartition("test_refusals.")[2] for each in code.names}
    assert {"FACTOR", "Settings.shift", "bias"} <= places and "LARGE" not in places and not code.outside


def test_changed_values_of_a_capture() -> None:
    """Reads are by class; a value that comes back is no change, and neither is what nobody read."""
    model = Stateful(lambda model, x: x * model.longest)
    with recorded_reads() as record:
        capture(model, (torch.randn(3, 4),))
    frozen = FrozenReads(model, record.reads)
    model.longest, model.calls = 3, 5
    assert frozen.changed() == (("longest", "3"),)
    model.longest = 0
    assert frozen.changed() == ()
    model.body = _cached
    assert [place for place, _ in frozen.changed()] == ["body"]


LARGE = numpy.random.default_rng(0).standard_normal((2**19, 1, 4), dtype="float32")
REFUSED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "item": (lambda f, x: f(x).sum() * x.max().item(), "data of a tensor"),
    "branch": (lambda f, x: f(x).sum() if x.sum() > 0 else f(x).mean(), "data of a tensor"),
    "boolean index": (lambda f, x: f(x)[x > 0].cumsum(0).sum(), "data of a tensor"),
    "tensor hook": (lambda f, x: _hooked(f(x)).sum(), "hook"),
    "a large constant": (lambda f, x: (f(x) + torch.from_numpy(LARGE)).sum(), "too large for a constant"),
}


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient)
    return x


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    body, words = REFUSED[name]
    with pytest.raises(CaptureError, match=words) as caught:
        capture(Net(body), (torch.randn(6, 4),))
    assert "\n" not in str(caught.value) and "test_refusals.py:" in str(caught.value)
    assert capfd.readouterr() == ("", "")


EQUAL: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "constant": lambda f, x: (f(x) + torch.tensor(0.5)).sum(),
    "mean": lambda f, x: f(x).mean(),
    "chunks": lambda f, x: sum((i + 1) * piece.mean() for i, piece in enumerate(f(x).chunk(2, -1))),  # type: ignore[return-value,misc]
    "smooth l1": lambda f, x: F.smooth_l1_loss(f(x), x),
    "binary": lambda f, x: F.binary_cross_entropy_with_logits(f(x), x.sigmoid()),
    "smoothing": lambda f, x: F.cross_entropy(f(x), x.argmax(-1), label_smoothing=0.1),
    "sum": lambda f, x: F.cross_entropy(f(x), x.argmax(-1), reduction="sum"),
    "detach": lambda f, x: (f(x) * f(x).detach()).sum(),
    "round": lambda f, x: (f(x).round() * f(x)).sum(),
}


@pytest.mark.parametrize("name", list(EQUAL))
def test_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    model, x = Net(EQUAL[name]).double(), torch.randn(6, 4, dtype=torch.float64)
    check_captured(capture(model, (x,)), model, {"x": x}, loss_rtol=1e-7, rtol=1e-6, atol=1e-9)


def test_no_grad_keeps_its_line() -> None:
    def body(f: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = f(x).abs()
        return (f(x) * scale).sum()

    nodes = [node for block in capture(Net(body), (torch.randn(6, 4),)).blocks for node in block.nodes if node.no_grad]
    assert nodes and all(node.source.startswith("test_refusals.py:") for node in nodes)


class Recurrent(nn.Module):
    """Two layers, with or without dropout between them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 2, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0].square().mean()


def test_dropout_between_recurrent_layers() -> None:
    """It becomes an operation of its own between operations of one layer each."""
    graph = capture(Recurrent(0.5), (), {"x": torch.randn(4, 3, 8)})
    ops = [node.op for block in graph.blocks for node in block.nodes if node.op in ("aten.lstm.input", "ap.dropout")]
    assert ops == ["aten.lstm.input", "ap.dropout", "aten.lstm.input"]
    assert "ap.dropout" not in str(capture(Recurrent(0.0), (), {"x": torch.randn(4, 3, 8)}))


def test_lazy_modules_are_called_first() -> None:
    with pytest.raises(CaptureError, match="call the model once"):
        capture(nn.Sequential(nn.LazyLinear(4)), (torch.randn(6, 4),))
    with pytest.raises(CaptureError, match="0.weight has no shape yet"):  # before ranks compare their models, which need shapes
        check_model(nn.Sequential(nn.LazyLinear(4)))


def test_sparse_gradients_are_said_to_be_dense() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(32, 8, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rows(ids).square().mean()

    with pytest.warns(UserWarning, match=r"sparse=True of rows \(test_refusals.py:\d+\) is ignored"):
        graph = capture(Rows(), (torch.zeros(8, 4, dtype=torch.long),), {})
    assert all(True not in node.args for block in graph.blocks for node in block.nodes if node.op == "aten.embedding")


def test_gradients_that_count_the_batch_are_refused() -> None:
    rows = nn.Sequential(nn.Embedding(32, 8, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(32, 4))
    with pytest.raises(CaptureError, match="scale_grad_by_freq=True, which divides gradients by counts"):
        capture(rows, (torch.zeros(8, 4, dtype=torch.long),), {})


def test_an_embedding_with_a_largest_norm_names_it() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"writes to the parameter 0.weight, .* leave max_norm of its embedding out") as caught:
        capture(model, (torch.zeros(2, 3, dtype=torch.int64),))
    assert "\n" not in str(caught.value)
