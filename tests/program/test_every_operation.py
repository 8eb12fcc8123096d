"""Every operation that has a rule goes through the text and ranks: torch's own samples of the table's operations, in
programs of drawn placements; and the operations without tensors, which have no samples there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.oracles.operation_samples import BATCH, core_operations, samples
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import AutoparError, CaptureError
from autopar.operations.table import operations
from autopar.passes.lower import lower
from autopar.program.build import render
from autopar.runtime.step.inputs import NamedBatch

WITHOUT_TENSORS: dict[str, Callable[[], Tensor]] = {
    "arange": lambda: torch.arange(6, dtype=torch.float64),
    "full": lambda: torch.full((2, 3), 0.5, dtype=torch.float64),
    "zeros": lambda: torch.zeros(2, 3, dtype=torch.float64),
    "ones": lambda: torch.ones(2, 3, dtype=torch.float64),
    "scalar_tensor": lambda: torch.scalar_tensor(0.5, dtype=torch.float64),
    "eye": lambda: torch.eye(4, dtype=torch.float64),
    "linspace": lambda: torch.linspace(-1, 2, 16, dtype=torch.float64),
    "logspace": lambda: torch.logspace(-1, 2, 16, dtype=torch.float64),
    "tril_indices": lambda: torch.tril_indices(4, 4).double(),
    "triu_indices": lambda: torch.triu_indices(3, 4, offset=1).double(),
    "hann_window": lambda: torch.hann_window(8, periodic=False, dtype=torch.float64),
    "hamming_window": lambda: torch.hamming_window(8, True, 0.5, 0.4, dtype=torch.float64),
    "blackman_window": lambda: torch.blackman_window(8, dtype=torch.float64),
    "bartlett_window": lambda: torch.bartlett_window(8, dtype=torch.float64),
    "kaiser_window": lambda: torch.kaiser_window(8, True, 5.0, dtype=torch.float64),
    "fft_fftfreq": lambda: torch.fft.fftfreq(8, d=0.5, dtype=torch.float64),
    "fft_rfftfreq": lambda: torch.fft.rfftfreq(8, dtype=torch.float64),
    "range": lambda: torch.range(1, 8, dtype=torch.float64),
}
UNKNOWN_VALUES = ("empty", "rand", "randn")
RANDOM = ("rand", "bernoulli", "multinomial", "dropout", "normal", "uniform", "empty")
SOME = ("add", "gather", "cumsum", "tril", "var", "index_put", "nn.functional.pad", "nn.functional.conv2d", "sort", "scatter")

Case = tuple[str, str, dict[str, Tensor]]
"""An operation, its program for two ranks, and its inputs."""


class Made(nn.Module):
    """What an operation makes, beside an input."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.make, self.head = make, nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        made = self.make()
        weights = torch.arange(1, made.numel() + 1, dtype=torch.float64).reshape(made.shape)
        return self.head(x).square().mean() * (made * weights).sum()


def program(model: nn.Module, given: Any, seed: int) -> str:
    """The text. Placements are drawn: operations are sharded where they can be."""
    graph = capture(model, (), given)
    return render(lower(graph, drawn_candidate(graph, mesh_of(dp=1, tp=2), seed, wild=0.5)))


def losses(cases: list[Case]) -> list[float | str]:
    """On a rank."""
    out: list[float | str] = []
    for name, text, given in cases:
        try:
            out.append(float(parallel_model(text, {}, check_every=0)(NamedBatch(given))))
        except Exception as error:  # noqa: BLE001  that is what is looked for
            out.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return out


def test_the_table_of_factories_is_complete() -> None:
    assert {*WITHOUT_TENSORS, *UNKNOWN_VALUES} == {
        name.removeprefix("aten.") for name, record in operations().items() if record.factory
    }


@pytest.mark.parametrize("name", WITHOUT_TENSORS)
def test_operations_without_tensors(name: str) -> None:
    """The gate refused the program of some, after the whole search."""
    text = program(Made(WITHOUT_TENSORS[name]), {"x": torch.randn(4, 4, dtype=torch.float64)}, 0)
    assert f"torch.ops.aten.{name}" not in text or name in ("range", "fft_fftfreq", "fft_rfftfreq")


def cases_of(names: tuple[str, ...], most: int) -> Iterator[tuple[Case, float]]:
    """Samples of the operations with these names (of all, without names), with the loss of one process."""
    for info in core_operations():
        if (names and info.name not in names) or any(word in info.name for word in RANDOM):
            continue
        for seed, (model, tensors) in enumerate(samples(info, most)):
            try:
                capture(model, (), {"tensors": tensors, "batch": BATCH})
            except CaptureError:
                continue  # `tests/rules/test_core_opset.py` counts them
            try:
                text = program(model, {"tensors": tensors, "batch": BATCH}, seed)
            except AutoparError as error:
                raise AssertionError(f"{info.name}: {error}") from error
            named = {f"tensors_{index}": tensor for index, tensor in enumerate(tensors)}
            yield (info.name, text, named | {f"batch_{index}": x for index, x in enumerate(BATCH)}), float(model(tensors))


def compare(ranks: RankPool, names: tuple[str, ...], most: int) -> int:
    found = list(cases_of(names, most))
    wrong = []
    for begin in range(0, len(found), 20):
        part = found[begin : begin + 20]
        for said in ranks.run(losses, [case for case, _ in part], world=2, timeout=300):
            for (case, expected), loss in zip(part, said, strict=True):
                close = isinstance(loss, float) and torch.allclose(
                    torch.tensor(loss).double(), torch.tensor(expected).double(), rtol=1e-6, atol=1e-9, equal_nan=True
                )
                if not close:
                    wrong.append(f"{case[0]}: {loss}, not {expected}")
    assert not wrong, wrong[:5]
    return len(found)


def test_some_operations_on_ranks(ranks: RankPool) -> None:
    assert compare(ranks, SOME, 1) >= len(SOME) - 1


@pytest.mark.slow
def test_all_operations_on_ranks(ranks: RankPool) -> None:
    assert compare(ranks, (), 1) > 100
