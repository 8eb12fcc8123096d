"""Each measure of the summary against an example worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from support.oracles.published_rows import row

from autopar.validate.summary import (
    Comparison,
    measure_of,
    memory_errors,
    null_model,
    ordered_pairs,
    percentile,
    regret,
    sweeps,
    time_errors,
)


def point(measured: float, predicted: float | None, source: str = "a", **changes: Any) -> Comparison:
    """A dense run of 8 devices and 1000 tokens a step."""
    plain = {"n_experts": None, "n_gpus": 8, "tokens_per_step": 1000, "step_seconds": measured, "source": source}
    return Comparison(row("lf-001", **(plain | changes)), predicted)


def test_every_source_weighs_the_same() -> None:
    """Source a has errors 10, 20, 30 %, b has 2 %: (20 + 2) / 2, not the median of four rows."""
    found = time_errors([point(1.0, 1.1), point(1.0, 0.8), point(1.0, 1.3), point(1.0, 1.02, "b"), point(1.0, None, "c")])
    assert found.dense_median == pytest.approx(0.11)
    assert (found.dense_rows, found.dense_sources, found.moe_rows) == (4, 2, 0)
    assert found.dense_p90 == pytest.approx(0.27)  # of 2, 10, 20, 30: 0.9 x 3 = 2.7 -> 20 + 0.7 x 10


def test_experts_are_counted_apart() -> None:
    found = time_errors([point(1.0, 1.5, n_experts=8), point(1.0, 0.9, n_experts=8), point(1.0, 1.0)])
    assert found.moe_median == pytest.approx(0.3)
    assert found.dense_median == 0.0 and found.moe_rows == 2


def test_nothing_counts_in_an_empty_table() -> None:
    found = time_errors([])
    assert found.dense_median is None and found.order_accuracy is None and found.regret_max is None


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([], 0.9) is None


def test_order_of_pairs() -> None:
    """Measured 1, 2, 2.1: the last two differ by 5 % and do not count. A tie of predictions counts half."""
    assert ordered_pairs([point(1.0, 5.0), point(2.0, 6.0), point(2.1, 4.0)]) == [1.0, 0.0]
    assert ordered_pairs([point(1.0, 5.0), point(2.0, 5.0)]) == [0.5]
    assert ordered_pairs([point(1.0, 5.0), point(1.1, 4.0)]) == []  # exactly 10 %: not more


def test_order_is_of_device_seconds_per_token() -> None:
    """Twice the time for four times the tokens is the faster run."""
    small, large = point(1.0, 1.0), point(2.0, 2.0, tokens_per_step=4000)
    assert ordered_pairs([small, large]) == [1.0]
    assert regret([small, large]) == 0.0


def test_regret_takes_the_worst_of_a_tie() -> None:
    assert regret([point(1.0, 2.0), point(1.3, 1.0), point(2.0, 3.0)]) == pytest.approx(0.3)
    assert regret([point(1.0, 1.0), point(1.3, 1.0), point(2.0, 3.0)]) == pytest.approx(0.3)
    assert regret([point(1.0, 1.0), point(1.3, 1.1), point(2.0, 3.0)]) == 0.0


def test_sweeps_are_runs_that_differ_in_how_only() -> None:
    same = [point(1.0, 1.0), point(2.0, 1.0, tp=2)]
    others = [point(1.0, 1.0, **{name: value}) for name, value in (("n_gpus", 16), ("seq_len", 7), ("gpu", "x"))]
    others += [point(1.0, 1.0, "b"), point(1.0, 1.0, precision="fp8"), point(1.0, 1.0, model_family="x"), point(1.0, None)]
    assert sweeps([*same, *others]) == [same]
    assert time_errors([*same, *others]).sweeps == 1  # two configurations are the least choice
    assert time_errors([*same, point(4.0, 0.5, tp=4)]).regret_max == pytest.approx(3.0)


def test_a_configuration_that_was_measured_twice_is_one() -> None:
    """No choice, and no regret, between a run and its repetition; the mean of both stands beside another configuration."""
    twice = [point(1.0, 1.0, id="a"), point(1.4, 1.0, id="b", notes="again")]
    assert time_errors(twice).sweeps == 0 and time_errors(twice).regret_mean is None
    found = time_errors([*twice, point(1.8, 0.9, tp=2)])
    assert found.sweeps == 1 and found.regret_mean == pytest.approx(0.5)  # 1.8 over (1.0 + 1.4) / 2


def test_every_source_weighs_the_same_in_the_order() -> None:
    """Source a has three pairs, all wrong, b has one, right."""
    wrong = [point(1.0, 3.0), point(2.0, 2.0, tp=2), point(4.0, 1.0, tp=4)]
    found = time_errors([*wrong, point(1.0, 1.0, "b"), point(2.0, 2.0, "b", tp=2)])
    assert found.pairs == 4 and found.order_accuracy == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "measure"),
    [
        ("nvidia-smi used", "nvidia_smi"),
        ("caching-allocator max reserved, max over ranks", "reserved"),
        ("torch.cuda allocated peak on last rank", "allocated"),
        ("allocated or reserved not stated, rank not stated", "unstated"),
        ("", "unstated"),
    ],
)
def test_measures_of_memory(text: str, measure: str) -> None:
    assert measure_of(row("lf-001", memory_measure=text)) == measure


def test_memory_by_measure_and_out_of_memory() -> None:
    def run(predicted: float, **changes: Any) -> Comparison:
        plain = {"memory_unit": "GB (1e9)", "memory_measure": "torch.cuda allocated peak", "peak_mem_gb": None}
        return Comparison(row("lf-001", **(plain | changes)), 1.0, predicted, least_bytes=predicted)

    ran = [run(11e9, peak_mem_gb=10.0), run(9.5e9, peak_mem_gb=10.0), run(70e9)]
    failed = [run(90e9, notes="OOM", step_seconds=None), run(20e9, notes="OOM", step_seconds=None)]
    found = memory_errors([*ran, *failed], lambda _: 60e9)
    assert found["allocated"]["rows"] == 2
    assert found["allocated"]["median"] == pytest.approx(0.075)
    assert found["allocated"]["worst"] == pytest.approx(0.1)
    assert found["reserved"] == {"rows": 0, "median": None, "p90": None, "worst": None}
    assert found["out_of_memory"] == {"rows": 2, "told": 1, "ran": 3, "ran_but_predicted_not_to_fit": 1}


def test_null_model_is_one_utilisation() -> None:
    """Ideal 1 of 2, 4 and 5 seconds: shares 0.5, 0.25, 0.2; the median predicts 4 s for all."""
    runs = [point(seconds, 1.0, id=name) for name, seconds in (("x", 2.0), ("y", 4.0), ("z", 5.0))]
    share, found = null_model(runs, {"x": 1.0, "y": 1.0, "z": 1.0})
    assert share == 0.25
    assert found.dense_median == pytest.approx(0.2)
