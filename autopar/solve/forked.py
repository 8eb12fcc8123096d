"""Work on forked copies of this process: a copy sees every table that is in memory, and only results are sent back. What a
function changes in memory is lost in a copy, so its result must say all, and be one that pickle takes.

A copy that fails brings nothing back, and the work is done here: an error shows where it can be handled. Solvers are told to
start no threads (`ilp.solver`): a copy would wait for them forever.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_NUMBER_BYTES = 4


def able_processes(processes: int) -> int:
    """Return `processes`, or 1 where the machine cannot fork."""
    return processes if "fork" in multiprocessing.get_all_start_methods() else 1


class ForkedCall(Generic[R]):
    """A call of ``function()`` on a copy of this process, which begins at once, while this one goes on."""

    def __init__(self, function: Callable[[], R]) -> None:
        self.function = function
        self._receiving, sending = multiprocessing.Pipe(duplex=False)

        def run() -> None:
            gc.disable()  # a collection would write to every page
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that was copied ends this one
            with suppress(Exception), sending:
                sending.send(function())

        self._process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of other threads in this process: a copy needs none of them
            self._process.start()
        sending.close()

    def result(self) -> R:
        """Wait for the call, and return its result."""
        try:
            answer: R = self._receiving.recv()
        except EOFError:
            answer = self.function()
        self.cancel()
        return answer

    def cancel(self) -> None:
        """End the copy."""
        self._receiving.close()
        self._process.kill()
        self._process.join()


class Meanwhile(Generic[R]):
    """A context of a call of ``function()`` on a copy of this process where there may be two, else here, once it is asked for."""

    def __init__(self, function: Callable[[], R], processes: int) -> None:
        self.function = function
        self._call = ForkedCall(function) if able_processes(processes) > 1 else None

    def result(self) -> R:
        return self._call.result() if self._call is not None else self.function()

    def __enter__(self) -> Meanwhile[R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._call is not None:
            self._call.cancel()


def forked_map(function: Callable[[T], R], items: Sequence[T], processes: int) -> list[R]:
    """Return ``[function(item) for item in items]`` on this process and up to `processes` - 1 copies, each taking the next item
    when it is done with one. Raises what `function` raises."""
    copies_wanted = min(able_processes(processes), len(items)) - 1
    if copies_wanted < 1:
        return [function(item) for item in items]
    numbers = _numbers(len(items))

    def work() -> dict[int, R]:
        return {number: function(items[number]) for number in _taken(numbers)}

    copies: list[ForkedCall[dict[int, R]]] = []
    done: dict[int, R] = {}
    try:
        copies += [ForkedCall(work) for _ in range(copies_wanted)]
        done.update(work())
        for copy in copies:
            done.update(copy.result())
    finally:
        os.close(numbers)
        for copy in copies:
            copy.cancel()
    # a copy that fails has taken what nobody brings back
    return [done[number] if number in done else function(items[number]) for number in range(len(items))]


class Lookahead(Generic[T, R]):
    """A loop over items whose later ones may turn out to be unneeded: while one is computed here, the next ones are computed by
    copies, which are ended where nobody asks for them. A context.

    `reads` gives what `function` reads beside its item and the loop changes. What a copy computed counts only where that is
    still equal: so the results are those of one process, however fast the copies are."""

    def __init__(self, function: Callable[[T], R], processes: int, reads: Callable[[T], object] = lambda item: None) -> None:
        self.function, self.copies_wanted, self.reads = function, able_processes(processes) - 1, reads
        self._ahead: dict[T, tuple[object, ForkedCall[R]]] = {}

    def result(self, item: T, upcoming: Iterable[T] = ()) -> R:
        """Return the result of `item`. `upcoming`: what may follow, the likeliest first; other copies are ended."""
        wanted = dict.fromkeys(upcoming) if self.copies_wanted else {}
        for each, (before, copy) in list(self._ahead.items()):
            if before != self.reads(each) or (each not in wanted and each != item):
                copy.cancel()
                del self._ahead[each]
        call = self._ahead.pop(item, None)
        for each in wanted:
            if len(self._ahead) >= self.copies_wanted:
                break
            if each not in self._ahead:
                self._ahead[each] = self.reads(each), ForkedCall(partial(self.function, each))
        return call[1].result() if call is not None else self.function(item)

    def results(
        self, order: Sequence[T], is_wanted: Callable[[T], bool], is_worth_a_copy: Callable[[T], bool]
    ) -> Iterator[tuple[T, R]]:
        """Yield each item that is wanted when its turn comes, with its result."""
        for number, item in enumerate(order):
            if is_wanted(item):
                rest = (each for each in order[number + 1 :] if is_wanted(each) and is_worth_a_copy(each))
                yield item, self.result(item, rest)

    def __enter__(self) -> Lookahead[T, R]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for _, copy in self._ahead.values():
            copy.cancel()


def _numbers(count: int) -> int:
    """A pipe with the numbers of all items, from which every process reads the next one."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(_NUMBER_BYTES, "little") for number in range(count)))
    os.close(writing)
    return reading


def _taken(numbers: int) -> Iterator[int]:
    while number := os.read(numbers, _NUMBER_BYTES):
        yield int.from_bytes(number, "little")
