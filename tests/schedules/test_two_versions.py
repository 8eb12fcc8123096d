"""A pipeline that is never drained."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.schedules.check import check
from autopar.schedules.weight_versions import unroll_window, weight_version_window, window_with_transfers


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_steps_run_one_into_the_other(stages: int, extra: int) -> None:
    many = stages + extra
    made = weight_version_window(stages, many)
    for steps in (1, 2, 4):
        found = unroll_window(made, steps)
        assert found.micro_batches == steps * many
        assert check(found) == tuple(stages - stage for stage in range(stages))  # 1F1B's, never more
    assert [str(each) for each in made.ranks[-1][:4]] == [f"{stages - 1}{text}" for text in ("F0", "B0", "F1", "B1")]


@pytest.mark.parametrize("stages", [2, 4])
def test_every_message_has_two_ends(stages: int) -> None:
    made = window_with_transfers(weight_version_window(stages, stages + 2))
    sent: dict[tuple[int, int, str], int] = {}
    for line in made.ranks:
        for action in line:
            step = 1 if action.kind.endswith("F") else -1
            if action.kind.startswith("SEND"):
                key = action.chunk + step, action.micro_batch, action.kind[-1]
                sent[key] = sent.get(key, 0) + 1
    received = {(a.chunk, a.micro_batch, a.kind[-1]): 1 for line in made.ranks for a in line if a.kind.startswith("RECV")}
    assert sent == received
    for line in made.ranks:  # a receive is posted before its consumer, in the same window
        for action in line:
            if action.kind.startswith("RECV"):
                kind = "F" if action.kind == "RECV_F" else "B"
                consumer = next(a for a in line if (a.chunk, a.kind, a.micro_batch) == (action.chunk, kind, action.micro_batch))
                assert line.index(action) < line.index(consumer)


def test_too_few_micro_batches() -> None:
    with pytest.raises(PlanError, match="at least 4 micro-batches"):
        weight_version_window(4, 3)
