"""Schedules that cannot run are refused, and the faulty cell is marked."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Action, Schedule
from autopar.schedules.check import check
from autopar.schedules.clock import ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of

FAULTS = [
    ("0F0 0B0\n1B0 1F0", "rank 1, cell 0: >>1B0<< 1F0: 1B0 comes before 1F0"),
    ("0F0 0F0 0B0\n1F0 1B0", "rank 0, cell 1: 0F0 >>0F0<< 0B0: 0F0 is there twice"),
    ("0F0 0I0 0W0 0B0\n1F0 1B0", "rank 0, cell 3: 0F0 0I0 0W0 >>0B0<<: 0B0 is there twice"),
    ("0F0 0W0 0I0\n1F0 1B0", "rank 0, cell 1: 0F0 >>0W0<< 0I0: 0W0 comes before 0I0"),
    ("0F0\n1F0 1B0", "rank 0, cell 0: >>0F0<<: 0F0 has no 0B0 or 0I0"),
    ("0F0 0I0\n1F0 1B0", "rank 0, cell 1: 0F0 >>0I0<<: 0I0 has no 0W0"),
    ("0F0 0B0 0F1 0B1\n1F0 1B0", "rank 1: no 1F1"),
    ("0F0 0B0\n1F0 1B0 0F1 0B1", "chunk 0 is on rank 0 and on rank 1"),
    ("0F0 0B0\n2F0 2B0", "chunk 1 is on no rank"),
    ("0F0 0B0\n\n1F0 1B0", "rank 1 has nothing to do"),
    (
        "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1",
        "has a deadlock: rank 0 waits for 1B0 (0F0 >>0B0<< 0F1 0B1); rank 1 waits for 0F1 (>>1F1<< 1F0 1B0 1B1)",
    ),
    (
        "0F0 0I0 0W0 0F1 0I1 0W1\n1F0 1F1 1I0 1W0 1I1 1W1",
        "rank 0 waits for 1I0 (0F0 >>0I0<< 0W0 0F1 0I1 ...); rank 1 waits for 0F1",
    ),
]


@pytest.mark.parametrize(("text", "said"), FAULTS, ids=[said[:30] for _, said in FAULTS])
def test_faults_are_marked(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)) as error:
        check(Schedule.parse(text, "mine"))
    assert "\n" not in str(error.value) and "schedule mine" in str(error.value)
    with pytest.raises(PlanError):  # a plan's own text is checked
        schedule_of(Pipeline(2, 1, "mine", actions=text), 2 if "F1" in text else 1)


@pytest.mark.parametrize("word", ["0X0", "F0", "0F", "0", "0F0,", "0UNSHARD3", "0RECV0", "-1F0", "0f0"])
def test_cells_that_cannot_be_read(word: str) -> None:
    with pytest.raises(PlanError, match=f"schedule mine, rank 1, cell 2: '{re.escape(word)}' is no action"):
        Schedule.parse(f"0F0 0B0\n1F0 1B0 {word}", "mine")


def test_everything_that_is_written_is_read() -> None:
    text = "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0I0 0W0 0REDUCE_GRAD 0RESHARD\n1RECV_F0 1F0 1B0 1SEND_B0"
    found = Schedule.parse(text, "mine")
    assert str(found) == text and (found.chunks, found.micro_batches, found.rank_of) == (2, 1, (0, 1))
    assert found.splits_backward and str(found.compute) == "0F0 0I0 0W0\n1F0 1B0"
    assert Action.parse("12SEND_B34") == Action(12, "SEND_B", 34) and check(found) == (1, 1)


def test_limits() -> None:
    assert check(schedule_of(Pipeline(3), 5), limits=(3, 2, 1)) == (3, 2, 1)
    with pytest.raises(
        PlanError, match=re.escape("rank 1, cell 1: 1F0 >>1F1<< 1B0 1F2 1B1 ...: 1F1 is one more micro-batch than the 1")
    ):
        check(schedule_of(Pipeline(3), 5), limits=(3, 1, 1))


@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_what_is_accepted_is_what_runs(stages: int, virtual: int, micro: int, random: Random) -> None:
    """Ranks with their actions in any order: accepted exactly where repeated passes over all ranks end them all."""
    ranks = []
    for rank in range(stages):
        actions = [Action(c, kind, m) for c in range(rank, stages * virtual, stages) for m in range(micro) for kind in "FB"]
        for _ in range(random.randint(0, 4)):
            a, b = random.randrange(len(actions)), random.randrange(len(actions))
            actions[a], actions[b] = actions[b], actions[a]
        ranks.append(tuple(actions))
    done: set[Action] = set()
    left = [list(actions) for actions in ranks]
    moved = True
    while moved:
        moved = False
        for actions in left:
            if actions:
                chunk, kind, m = actions[0].chunk, actions[0].kind, actions[0].micro_batch
                need = [Action(chunk - 1, "F", m)] * (chunk > 0) if kind == "F" else [Action(chunk, "F", m)]
                if kind == "B" and chunk < stages * virtual - 1:
                    need.append(Action(chunk + 1, "B", m))
                if done.issuperset(need):
                    done.add(actions.pop(0))
                    moved = True
    schedule = Schedule("drawn", tuple(ranks))
    if any(left):
        with pytest.raises(PlanError):
            check(schedule)
        with pytest.raises(PlanError):
            ScheduleClock.of(schedule)
    else:
        held = check(schedule)
        assert all(1 <= each <= virtual * micro for each in held)
        ScheduleClock.of(schedule)
