"""What may hide behind the main stream, by hand; and that more freedom is never slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.hardware import Cluster
from autopar.cost_models.overlap import Overlap
from autopar.cost_models.simulate import Part, Steps, simulate
from autopar.cost_models.traffic import Traffic

MINE = frozenset({"nvlink"})
NOTHING = Traffic(0, 0, 0, 0, 0, 0, 0)
amounts = st.integers(0, 12)


def step(overlap: Overlap, many: int = 1) -> Steps:
    """Three calls of 10 ticks each way, gathers of 4 and reductions of 6."""
    part = Part([(10, frozenset())], [(10, frozenset())], Traffic(4, 4, 4, 6, 6, 0, 0))
    return simulate([part] * 3, NOTHING, MINE, many, overlap=overlap)


def seconds(steps: Steps) -> float:
    return steps.forward_seconds + steps.backward_seconds


def test_all_hides_by_hand() -> None:
    """The first gather and the last reduction are seen; behind a call of the backward, 6 are reduced and 4 gathered."""
    assert seconds(step(Overlap())) == 4 + 30 + 30 + 6


def test_exposed_gathers_and_reductions_by_hand() -> None:
    """Three gathers forward, two backward (the last call keeps its weights), or three reductions at the end."""
    assert seconds(step(Overlap(gathers_behind=False))) == 3 * 4 + 30 + 2 * 4 + 30 + 6
    assert seconds(step(Overlap(reductions_behind=False))) == 4 + 30 + 30 + 3 * 6
    assert seconds(step(Overlap(gathers_behind=False, reductions_behind=False))) == 3 * 4 + 30 + 2 * 4 + 30 + 3 * 6


def test_contention_by_hand() -> None:
    """Transfers take a fifth of the speed while they run: 2 x 4 in the forward; in the backward 4, 6 + 4 and 6, and the last."""
    assert seconds(step(Overlap(contention=0.2))) == pytest.approx(4 + 30 + 0.2 * 8 + 30 + 0.2 * 20 + 6)


traffics = st.builds(Traffic, amounts, amounts, amounts, amounts, amounts, st.just(0), st.just(0))
bodies = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([frozenset(), MINE])), max_size=3)
parts = st.lists(st.builds(Part, bodies, bodies, traffics), min_size=1, max_size=4)


@given(parts, traffics, st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.4]), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bounds(calls: list[Part], root: Traffic, many: int, contention: float, reductions: bool, gathers: bool) -> None:
    """No less than the main stream alone, no more than one thing after the other; freedom from contention never hurts."""
    found = seconds(simulate(calls, root, MINE, many, overlap=Overlap(contention, reductions, gathers)))
    alone = many * sum(ticks for part in calls for ticks, _ in (*part.forward, *part.backward))
    sent = sum(each.data_axis_seconds(many) for each in (root, *(part.traffic for part in calls)))
    assert alone <= found + 1e-9 and found <= alone + sent + 1e-9
    assert seconds(simulate(calls, root, MINE, many, overlap=Overlap(0.0, reductions, gathers))) <= found + 1e-9
    assert seconds(simulate(calls, root, MINE, many, overlap=Overlap(0.0, True, gathers))) <= found + 1e-9


def test_description() -> None:
    found = Overlap.from_dict({"contention": 0.1, "gathers_behind": False, "sends_block": True})
    assert found == Overlap(0.1, gathers_behind=False, sends_block=True)
    assert Overlap.from_dict({}) == Overlap()
    with pytest.raises(ValueError, match="not a share"):
        Overlap.from_dict({"contention": 1.5})
    cluster = replace(Cluster.parse("dgx-h100:1"), overlap=found)
    assert Cluster.from_dict(cluster.to_dict()).overlap == found
