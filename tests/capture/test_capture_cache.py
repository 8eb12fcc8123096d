"""What other rooms take for a capture (`support.capture_cache`): a graph of before where nothing that it read has changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import capture_cache as caches
from support.capture_cache import capture_cache
from torch import Tensor, nn

from autopar import capture as captures
from autopar.capture import export
from autopar.capture.options import CaptureOptions
from autopar.capture.state.reads import recorded_reads
from autopar.errors import CaptureError

FACTORS = [1.0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.up(x)) * self.scale * FACTORS[0] + self.shift).sum()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def graph_of(model: nn.Module, rows: int = 6, **options: Any) -> Any:
    return captures.capture(model, (torch.ones(rows, 4),), **options)


@pytest.fixture(autouse=True)
def cache() -> Iterator[None]:
    with capture_cache():
        yield


def test_an_equal_model_has_the_graph_of_before_and_what_its_forward_read() -> None:
    with recorded_reads() as first:
        graph = graph_of(net())
    with recorded_reads() as second:
        assert graph_of(net()) is graph
    assert first.reads == second.reads and any(name == "scale" for _, name in second.read)


CHANGES: dict[str, Callable[[Net], Any]] = {
    "attribute": lambda model: setattr(model, "scale", 3.0),
    "frozen": lambda model: model.up.requires_grad_(False),
    "mode": lambda model: model.down.train(False),
    "dtype": lambda model: model.double().float().half(),
    "class": lambda model: setattr(model, "__class__", type("Net", (Net,), {"__module__": __name__, "__qualname__": "Net"})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_captured_anew(change: str) -> None:
    graph, other = graph_of(net()), net()
    CHANGES[change](other)
    assert graph_of(other, compute_dtype="float32") is not graph_of(net(), compute_dtype="float32")
    assert graph_of(net()) is graph


@pytest.mark.parametrize("state", ["up.weight", "shift"])
def test_values_of_state_are_no_part_of_it(state: str) -> None:
    """An export runs on copies without data."""
    graph, other = graph_of(net()), net()
    other.state_dict()[state].add_(1)
    assert graph_of(other) is graph


def test_a_global_that_the_forward_reads_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(net())
    monkeypatch.setitem(globals(), "FACTORS", [2.0])
    assert graph_of(net()) is not graph


def test_weights_that_are_tied_are_not_those_that_are_equal() -> None:
    equal, tied = net(), net()
    equal.down.weight.data.copy_(equal.up.weight.detach())
    tied.down.weight = tied.up.weight
    assert graph_of(tied) is not graph_of(equal)


def test_other_inputs_and_options_are_captured_anew() -> None:
    graph = graph_of(net())
    assert graph_of(net(), 8) is not graph and graph_of(net(), dropout=False) is not graph


def test_errors_and_warnings_are_said_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*given: Any) -> export.Export:
        warnings.warn("loud", stacklevel=2)
        return actual(*given)

    for _ in range(2):
        with pytest.raises(CaptureError):
            graph_of(net(), batch_norm="other")
    actual = export.Export
    monkeypatch.setattr(export, "Export", warn)
    for _ in range(2):
        with pytest.warns(UserWarning, match="loud"):
            graph_of(net(), compute_dtype="float16")


@pytest.fixture
def own_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run of tests that has exported nothing."""
    monkeypatch.setenv("AUTOPAR_TEST_RUN", str(tmp_path))
    forget(monkeypatch)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process has exported."""
    monkeypatch.setattr(caches, "_EXPORTS", {})
    monkeypatch.setattr(caches, "_ANY_BATCH", {})


class OtherProcess:
    """This process as another one of the run: it has no export, and counts those that it makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, actual = 0, export.Export.__init__

        def init(*given: Any) -> None:
            self.count += 1
            actual(*given)

        forget(monkeypatch)
        monkeypatch.setattr(export.Export, "__init__", init)


def test_another_process_has_the_graph_and_the_reads(own_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_reads() as first:
        graph = graph_of(net(), batch_dim=None)
    other, model, options = OtherProcess(monkeypatch), net(), CaptureOptions()
    with recorded_reads() as second:
        assert graph_of(model, batch_dim=()) == graph and other.count == 0
    assert first.reads == second.reads
    model.scale = 3.0  # of the call before, which is another model now
    shared = captures.Export(net(), (torch.ones(6, 4),), {}, options)
    assert other.count == 0
    graph = shared.graph_at({"x": torch.ones(12, 4)})
    assert other.count == 1 and graph == export.Export(net(), (torch.ones(12, 4),), {}, options).graph


def test_another_batch_has_the_graph_of_a_capture(own_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of(net())
    other = OtherProcess(monkeypatch)
    graph_of(net(), 8, compute_dtype="bfloat16")
    found = graph_of(net(), 12, compute_dtype="bfloat16")
    assert other.count == 1 and found.batch == 12
    options = CaptureOptions(compute_dtype="bfloat16")
    assert found == export.Export(net(), (torch.ones(12, 4),), {}, options).graph


@pytest.mark.parametrize("change", [*CHANGES, "method", "global"])
def test_another_process_with_another_model_exports_it(change: str, own_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph_of(net(), compute_dtype="float32")
    model, other = net(), OtherProcess(monkeypatch)
    if change == "method":
        monkeypatch.setattr(Net, "forward", lambda self, x: self.up(x).sum())
    elif change == "global":
        monkeypatch.setitem(globals(), "FACTORS", [2.0])
    else:
        CHANGES[change](model)
    graph_of(model, compute_dtype="float32")
    assert other.count == 1
