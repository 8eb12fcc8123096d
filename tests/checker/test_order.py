"""Schedules: every builder's is proven, and one that is changed in one place is refused where it deadlocks or loses an action."""

from __future__ import annotations

from random import Random

import pytest

from autopar.checker.order import ScheduleProof, Step, read_schedule, state_actions, unrolled
from autopar.checker.shards import NotProven
from autopar.ir.plan import Pipeline
from autopar.schedules.communicate import with_communication
from autopar.schedules.pipeline_schedule import schedule_of
from autopar.schedules.weight_versions import weight_version_window, window_with_transfers

SCHEDULES = [
    (Pipeline(stages, virtual, schedule), parts)
    for schedule, virtual in (("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2))
    for stages, parts in ((2, 4), (4, 8))
]


def actions(pipeline: Pipeline, parts: int, zero: int = 1) -> list[list[Step]]:
    schedule = with_communication(schedule_of(pipeline, parts), (zero,) * (pipeline.stages * pipeline.virtual))
    return read_schedule([" ".join(map(str, rank)) for rank in schedule.ranks], 0)


def prove(stages: list[list[Step]], pipeline: Pipeline, parts: int) -> dict[str, int]:
    chunks = pipeline.stages * pipeline.virtual
    state_actions(stages, 0)
    return ScheduleProof(stages, chunks, parts, 0).check()


@pytest.mark.parametrize(("pipeline", "parts"), SCHEDULES, ids=[f"{p.schedule}-{p.virtual}-{p.stages}-{n}" for p, n in SCHEDULES])
def test_schedules_are_proven(pipeline: Pipeline, parts: int) -> None:
    for zero in (1, 3):
        found = prove(actions(pipeline, parts, zero), pipeline, parts)
        assert found["messages"] > 0


@pytest.mark.parametrize(("pipeline", "parts"), SCHEDULES, ids=[f"{p.schedule}-{p.virtual}-{p.stages}-{n}" for p, n in SCHEDULES])
def test_changed_schedules(pipeline: Pipeline, parts: int) -> None:
    """An action left out, doubled, or moved to another chunk or micro-batch is refused always."""
    stages, random = actions(pipeline, parts), Random(0)
    for _ in range(40):
        changed = [list(steps) for steps in stages]
        steps = random.choice(changed)
        index = random.randrange(len(steps))
        step = steps[index]
        kind = random.randrange(3)
        if kind == 0:
            if step.kind == "UNSHARD":  # then a block gathers by itself
                continue
            del steps[index]
        elif kind == 1:
            steps.insert(random.randrange(len(steps)), step)
        elif step.part >= 0:
            steps[index] = Step(step.chunk, step.kind, (step.part + 1) % parts)
        else:
            continue
        if kind == 0 and step.kind == "REDUCE_GRAD":
            continue  # which `certificate` counts
        with pytest.raises(NotProven):
            prove(changed, pipeline, parts)


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (2, 4), (4, 4), (4, 9)])
def test_windows_of_two_weight_versions(stages: int, parts: int) -> None:
    """A schedule that is never drained; where an action is left out, or two forwards change places, it is refused."""
    window = window_with_transfers(weight_version_window(stages, parts))
    plain = read_schedule([" ".join(map(str, rank)) for rank in window.ranks], 0)

    def proven(lines: list[list[Step]]) -> bool:
        try:
            return ScheduleProof(unrolled(lines, parts, 4), stages, 4 * parts, 0).check()["messages"] > 0
        except NotProven:
            return False

    assert proven(plain)
    for stage, steps in enumerate(plain):
        for index in range(len(steps)):
            assert not proven([*plain[:stage], [*steps[:index], *steps[index + 1 :]], *plain[stage + 1 :]])
    first = plain[0]
    forwards = [index for index, step in enumerate(first) if step.kind == "F"]
    first[forwards[0]], first[forwards[1]] = first[forwards[1]], first[forwards[0]]  # nothing has made what is sent between them
    assert not proven(plain)


def test_circles_and_crossed_messages() -> None:
    """Two stages that wait for each other, and sends in another order than their receives."""
    pipeline = Pipeline(2)
    stages = actions(pipeline, 2, zero=3)
    crossed = [list(steps) for steps in stages]
    sends = [i for i, step in enumerate(crossed[0]) if step.kind == "SEND_F"]
    forwards = [i for i, step in enumerate(crossed[0]) if step.kind == "F"]
    for a, b in ((sends[0], sends[1]), (forwards[0], forwards[1])):
        crossed[0][a], crossed[0][b] = crossed[0][b], crossed[0][a]
    with pytest.raises(NotProven, match="order"):
        prove(crossed, pipeline, 2)
    circle = [list(steps) for steps in stages]
    backward = next(i for i, step in enumerate(circle[0]) if step.kind == "B")
    circle[0].insert(0, circle[0].pop(backward))
    with pytest.raises(NotProven, match="waits forever"):
        prove(circle, pipeline, 2)
    late = [list(steps) for steps in stages]
    receive = next(i for i, step in enumerate(late[1]) if step.kind == "RECV_F")
    posted = late[1].pop(receive)
    use = next(i for i, step in enumerate(late[1]) if step == Step(posted.chunk, "F", posted.part))
    late[1].insert(use + 1, posted)
    with pytest.raises(NotProven, match="waits forever"):
        prove(late, pipeline, 2)
