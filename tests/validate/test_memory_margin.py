"""The default of the memory margin is that of the published runs; their memory is met by the allocator model of the planner."""

from __future__ import annotations

from functools import lru_cache
from statistics import median

import pytest
from support.oracles.published_rows import row, session, table
from support.published_runs import RUNS_OUT, margin_of, memory_residuals

from autopar.cost_models.hardware.allocator import COMMUNICATOR_BYTES, MEMORY_MARGIN, device_memory, process_bytes
from autopar.software.spending import quantile
from autopar.validate.report import MORE_COMMUNICATORS, Report, least_bytes, measured_stage, predicted_bytes, report
from autopar.validate.summary import Comparison


def test_every_source_has_the_same_weight() -> None:
    """A hundred rows of one source and one of another: half of the weight is the one's."""
    many = [("a", number / 100) for number in range(100)]
    assert quantile(many, 0.98) == 0.97  # two of a hundred exceed it
    assert quantile([*many, ("b", 5.0)], 0.98) == 5.0
    assert quantile([*many, ("b", -1.0)], 0.98) == 0.95  # each of a's has half of its weight
    assert quantile([], 0.98) == 0.0


def test_the_margin_follows_from_the_residual() -> None:
    """Of runs that take a quarter more than is predicted, a prediction of at most 0.8 of the memory fits."""
    one = row("mlm-001")
    assert one.measured_memory_bytes is not None
    point = Comparison(one, 1.0, one.measured_memory_bytes / 1.25)
    assert memory_residuals([point]) == [("NVIDIA/Megatron-LM", pytest.approx(0.25))]
    assert margin_of([point]) == pytest.approx(0.2)
    assert margin_of([Comparison(one, 1.0, one.measured_memory_bytes * 2)]) == 0.0


@pytest.mark.parametrize("name", ["bloom-020", "tt-001", "mlm-001"])
def test_validate_has_the_planners_figures(name: str) -> None:
    """By way of measuring; the communicators of other software are all that differs."""
    (priced,) = session().price([table()[name]])
    assert priced.evaluation is not None and priced.cluster is not None
    stage = measured_stage(priced.row, priced.evaluation)
    communicators = (stage.table["base"] - priced.cluster.device.base_bytes) // COMMUNICATOR_BYTES
    own = device_memory(stage.table, priced.cluster.device, communicators)
    more = MORE_COMMUNICATORS.get(priced.row.software_stack, 0) * COMMUNICATOR_BYTES
    for measure, size in (("allocated", own.allocated), ("reserved", own.reserved), ("nvidia_smi", own.shown + more)):
        assert predicted_bytes(priced.row, priced.evaluation, measure) == pytest.approx(size, abs=16)
    assert process_bytes(priced.cluster.device, communicators) == stage.table["base"]
    assert least_bytes(priced.row, priced.evaluation) <= own.shown + more


@lru_cache
def measured() -> Report:
    return report(session().price([each for each in table().values() if each.measured_memory_bytes]))


@pytest.mark.slow
def test_the_default_margin_is_that_of_the_published_runs() -> None:
    """At most one run in fifty takes more than the memory that such a plan leaves to it; and no more is left than that needs."""
    needed = margin_of(measured().points)
    assert needed <= MEMORY_MARGIN < needed + 0.02, f"needed for {RUNS_OUT:.0%}: {needed:.4f}"


@pytest.mark.slow
def test_the_memory_of_published_runs_is_met() -> None:
    points = measured().points
    limits = {"allocated": 0.03, "reserved": 0.10, "nvidia_smi": 0.10}
    for measure, limit in limits.items():
        assert measured().memory[measure]["median"] <= limit, measure
    assert median(abs(point.memory_error or 0.0) for point in points) <= 0.10
