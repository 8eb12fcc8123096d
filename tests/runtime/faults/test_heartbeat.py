"""The heartbeat of one process: what it takes for a failure of another rank, and when it ends its own process."""

from __future__ import annotations

import faulthandler
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from support.key_value_store import Store

from autopar.runtime.comm import ending
from autopar.runtime.comm.heartbeat import Heartbeat
from autopar.runtime.errors import BatchError, PeerProblem
from autopar.runtime.patches import apply_patches


def beating(store: Store, rank: int, size: int = 3, patience_seconds: float = 1.5) -> Heartbeat:
    made = Heartbeat(store, rank, size, lambda number: f"rank {number}", patience_seconds)
    made.start()
    return made


def stop(heart: Heartbeat) -> None:
    """As if the process were killed: no more beats, and no word of its end."""
    heart.watched_ranks, heart.store = [], Store()


def test_a_long_step_is_no_alarm() -> None:
    """Others beat; it is not they who are late. A stage that was silent before the step is not given up at once either."""
    store = Store()
    hearts = [beating(store, rank) for rank in range(3)]
    time.sleep(1.0)
    with hearts[0].watching(lambda: "a step"):
        time.sleep(2.0)
    assert all(heart.problem is None for heart in hearts)
    for heart in hearts:
        heart.close()
        assert not heart.thread.is_alive()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    found: list[int] = []
    monkeypatch.setattr(os, "_exit", found.append)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **options: None)
    return found


def test_silence_ends_the_process_soon_in_a_step_and_later_between_steps(exits: list[int]) -> None:
    store = Store()
    inside, between, other = (beating(store, rank) for rank in range(3))
    time.sleep(0.3)
    stop(other)
    with inside.watching(lambda: "a step"):
        time.sleep(1.15)
        assert exits == [1]
        time.sleep(0.4)
    assert exits == [1, 1]
    for heart in (inside, between):
        with pytest.raises(PeerProblem, match="rank 2 on .* has not answered"), heart.watching(lambda: "the next step"):
            pass
        heart.close()
    other.close()


def test_a_rank_whose_script_caught_its_own_failure_is_told_so(exits: list[int]) -> None:
    """The other ranks ended with it, and would be blamed for that."""
    store = Store()
    alone, other = beating(store, 0, 2), beating(store, 1, 2)
    time.sleep(0.3)
    with pytest.raises(IndexError), alone.watching(lambda: "0F0"):
        raise IndexError("index out of range")
    stop(other)
    time.sleep(1.5)
    with (
        pytest.raises(PeerProblem, match="rank 1 .*; before that rank 0 .* failed .*0F0: IndexError: .* the script went on"),
        alone.watching(lambda: "1F0"),
    ):
        pass
    alone.close()
    other.close()


def test_a_problem_that_was_raised_ends_the_process_too(exits: list[int]) -> None:
    """The main thread may hang after it raised it."""
    store = Store()
    alive, other = beating(store, 0, 2), beating(store, 1, 2)
    time.sleep(0.3)
    stop(other)
    with pytest.raises(PeerProblem), alive.watching(lambda: "a step"):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert not exits
    time.sleep(0.4 * 1.5 + 0.2)
    assert exits == [1]
    alive.close()
    other.close()


def test_who_is_slow_to_start_is_not_given_up(exits: list[int]) -> None:
    """It may have joined the process group and then build its model."""
    alive = beating(Store(), 0, 2)
    with alive.watching(lambda: "comparing"):
        time.sleep(1.6)
    assert alive.problem is None and not exits
    alive.close()


def test_who_ends_after_its_work_is_no_failure(exits: list[int]) -> None:
    store = Store()
    alive, other = beating(store, 0, 2), beating(store, 1, 2)
    with other.watching(lambda: "a step"), alive.watching(lambda: "a step"):
        pass
    other.close()
    time.sleep(1.6)
    assert alive.problem is None and not exits
    with pytest.raises(PeerProblem, match="rank 1 on .* ended its process"), alive.watching(lambda: "a step too many"):
        time.sleep(0.3)
        raise RuntimeError("[gloo] Connection closed by peer")
    alive.close()


@pytest.mark.parametrize("times", [1, 2])
def test_who_goes_on_after_errors_of_all_ranks_is_no_failure(times: int) -> None:
    store = Store()
    hearts = [beating(store, rank, 2) for rank in range(2)]
    for heart in hearts * times:
        with pytest.raises(ValueError, match="skipped"), heart.watching(lambda: "a step"):
            raise ValueError("this batch is skipped")
    time.sleep(0.3)
    for heart in hearts:
        with heart.watching(lambda: "the next step"):
            pass
        heart.close()


def test_a_store_that_hangs_is_noticed(exits: list[int]) -> None:
    """A stopped process that holds the store never answers: no call of the store returns."""
    store = Store()
    other, alive = beating(store, 0, 2), beating(store, 1, 2)
    time.sleep(0.3)
    store.hangs.clear()
    time.sleep(1.7)
    assert exits == [1, 1] and alive.problem is not None and "nor does the store" in alive.problem
    store.hangs.set()
    for heart in (other, alive):
        heart.close()


def test_an_exception_that_ends_a_process_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "_uncaught_by", ending.NEVER)  # this process goes on
    apply_patches()
    store = Store()
    first, second = beating(store, 0, 2), beating(store, 1, 2)
    first.step = second.step = 3
    sys.excepthook(ValueError, ValueError("no more data"), None)
    assert "no more data" in capsys.readouterr().err
    with pytest.raises(PeerProblem, match="^rank [01] on .* failed after step 3: ValueError: no more data$"):
        time.sleep(0.3)
        with second.watching(lambda: "forward"):
            pass
    first.close()
    second.close()


def test_a_backward_whose_error_a_section_catches_is_no_failure() -> None:
    """Planning observes backwards on meta tensors, some of which torch has not."""
    apply_patches()
    x = torch.ones((), requires_grad=True)
    x.register_hook(refuse)
    store = Store()
    first, second = beating(store, 0, 2), beating(store, 1, 2)
    with first.watching(lambda: "planning"):
        with pytest.raises(NotImplementedError):
            torch.autograd.grad(x * 2, x)
        assert first.doing is not None
        with second.watching(lambda: "planning"):
            time.sleep(0.3)
    for heart in (first, second):
        with heart.watching(lambda: "a step"):
            pass
        heart.close()


def refuse(_: torch.Tensor) -> None:
    raise NotImplementedError


def test_an_error_of_the_network_waits_for_the_culprit() -> None:
    store = Store()
    alive, other = beating(store, 0, 2, 3.0), beating(store, 1, 2, 3.0)
    time.sleep(0.3)
    stop(other)
    began = time.monotonic()
    with pytest.raises(PeerProblem, match="rank 1 on .* has not answered"), alive.watching(lambda: "a step"):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert time.monotonic() - began < 1.5  # half of what plain silence would take
    alive.close()
    other.close()


def test_the_first_failure_is_told() -> None:
    store = Store()
    first, second = beating(store, 0, 2), beating(store, 1, 2)
    with pytest.raises(ValueError, match="mine"), first.watching(lambda: "0F1"):
        raise ValueError("mine\nand more")
    with pytest.raises(PeerProblem, match="^rank 0 on .* failed while 0F1: ValueError: mine$"), second.watching(lambda: "1F1"):
        raise dist.DistBackendError("gone")
    first.close()
    second.close()


def test_a_refused_batch_is_no_failure() -> None:
    heart = beating(Store(), 0)
    with pytest.raises(BatchError), heart.watching(lambda: "a step"):
        raise BatchError("too small")
    assert heart.problem is None
    heart.close()


def test_a_lost_store_is_noticed_in_a_step_only(exits: list[int]) -> None:
    store = Store()
    heart = beating(store, 1, 2)
    store.broken = True
    time.sleep(1.5)
    assert heart.problem is None
    with heart.watching(lambda: "a step"):
        time.sleep(1.6)
    assert exits == [1]
    assert heart.problem is not None and "rank 0 does not answer, nor does the store" in heart.problem
    heart.close()


class Owner:
    """A model, as the heartbeat sees it."""


def test_a_model_collected_while_its_rank_glances_is_in_no_section(exits: list[int]) -> None:
    """A glance at a tensor is one of every model that does nothing, and Python may collect another model in it."""
    store, owner = Store(), Owner()
    first, second = beating(store, 0, 2), beating(store, 1, 2)
    time.sleep(0.3)
    first.stop_with(owner)
    with first.watching(lambda: "a step"), second.watching(lambda: "a step"):
        pass
    with first.glancing("a value of a parameter"):
        del owner
    assert not first.thread.is_alive()
    with second.glancing("a value of a parameter"):
        time.sleep(0.5)
    assert second.problem is None and not exits
    second.close()
