"""Work on forked copies of this process: a copy sees every table that is in memory, and only results are sent back. What a
function changes in memory is lost in a copy, so its result must say all, and be one that pickle takes.

A copy that fails brings nothing back, and the work is done here: an error shows where it can be handled. Solvers are told to
start no threads (`ilp.solver`): a copy would wait for them forever.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


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
        finally:
            self.cancel()
        return answer

    def cancel(self) -> None:
        """End the copy."""
        self._receiving.close()
        self._process.kill()
        self._process.join()


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
