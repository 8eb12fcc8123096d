"""Work on forked copies: what one process finds, whatever happens to the copies."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from autopar.errors import PlanError
from autopar.solve.forked import ForkedCall, Lookahead


def test_a_call_goes_on_meanwhile() -> None:
    call = ForkedCall(lambda: (os.getpid(), "done"))
    process, word = call.result()
    assert process != os.getpid() and word == "done"


def test_what_cannot_be_sent_is_done_here() -> None:
    assert ForkedCall(lambda: lambda: 3).result()() == 3


def test_a_loop_looks_ahead_and_ends_what_nobody_asks_for() -> None:
    here = os.getpid()

    def work(item: tuple[int]) -> tuple[int, int]:
        if item == (2,):
            time.sleep(600)
        return item[0], os.getpid()

    items = [(0,), (1,), (2,), (3,)]
    with Lookahead(work, 2) as ahead:
        assert ahead.result(items[0], items[1:]) == (0, here)
        number, process = ahead.result(items[1], items[2:])
        assert number == 1 and process != here
        assert ahead.result(items[3]) == (3, here), "the third is ended"
    assert not multiprocessing.active_children()


def test_a_copy_that_fails_is_made_good_here() -> None:
    """Where it dies the result comes from here, and so does what it raises."""
    here = os.getpid()

    def work(number: int) -> int:
        if number == 3:
            raise PlanError("three")
        if os.getpid() != here:
            os._exit(1)
        return number + 1

    with Lookahead(work, 2) as ahead:
        assert [ahead.result(number, [number + 1]) for number in range(3)] == [1, 2, 3]
        with pytest.raises(PlanError, match="three"):
            ahead.result(3)
    assert not multiprocessing.active_children()


def test_what_a_copy_read_must_still_hold() -> None:
    """A copy that began before the loop learned something is no answer to what is asked now."""
    here, best = os.getpid(), [10.0]
    items = [(0,), (1,), (2,)]
    with Lookahead(lambda item: (item[0], best[0], os.getpid()), 2, lambda item: best[0]) as ahead:
        assert ahead.result(items[0], items[1:]) == (0, 10.0, here)
        best[0] = 5.0
        assert ahead.result(items[1], items[2:]) == (1, 5.0, here)
        number, seen, process = ahead.result(items[2])
        assert (number, seen) == (2, 5.0) and process != here
    assert not multiprocessing.active_children()
