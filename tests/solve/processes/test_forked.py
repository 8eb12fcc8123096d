"""Work on forked copies: what one process finds, whatever happens to the copies."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.solve.forked import ForkedCall, Lookahead, Meanwhile, forked_map


def test_results_come_in_the_order_of_the_items() -> None:
    found = forked_map(lambda number: (number * number, os.getpid()), list(range(40)), 3)
    assert [square for square, _ in found] == [number * number for number in range(40)]
    assert len({process for _, process in found}) <= 3


def test_each_item_is_taken_once(tmp_path: Path) -> None:
    def take(number: int) -> None:
        (tmp_path / f"{number}-{os.getpid()}").touch()

    forked_map(take, list(range(200)), 2)
    assert sorted(int(path.name.split("-")[0]) for path in tmp_path.iterdir()) == list(range(200))


def test_a_copy_that_dies_is_made_good_here() -> None:
    here = os.getpid()

    def work(number: int) -> int:
        if os.getpid() != here:
            os._exit(1)
        return number + 1

    assert forked_map(work, list(range(8)), 2) == list(range(1, 9))


def test_what_a_copy_raises_is_raised_here() -> None:
    def work(number: int) -> int:
        if number == 5:
            raise PlanError("five")
        return number

    with pytest.raises(PlanError, match="five"):
        forked_map(work, list(range(8)), 3)


def test_nothing_is_left_of_the_copies() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        forked_map(lambda number: number, [1, 2, 3], 2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not multiprocessing.active_children()


def test_a_call_goes_on_meanwhile() -> None:
    call = ForkedCall(lambda: (os.getpid(), "done"))
    process, word = call.result()
    assert process != os.getpid() and word == "done"
    assert Meanwhile(os.getpid, 1).result() == os.getpid()
    with Meanwhile(os.getpid, 2) as other:
        assert other.result() != os.getpid()


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
