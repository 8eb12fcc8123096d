"""The messages between ranks while a checkpoint is saved or loaded. What goes wrong on one rank is told to all, and raised on
all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from ..comm.agreement import gather
from ..comm.peer_watch import is_communication_error
from ..errors import CheckpointProblem, DamagedCheckpoint, RuntimeProblem, StateError, one_line

_Value = TypeVar("_Value")


class Failed(NamedTuple):
    """A failure in place of a value: what went wrong in making it. `damaged`: with the files, so that another checkpoint may
    do."""

    text: str
    damaged: bool = False


def failure_of(error: Exception) -> Failed:
    """Return an error as one that all ranks can raise. The loss of another rank is raised here."""
    if isinstance(error, RuntimeProblem):
        return Failed(str(error), isinstance(error, DamagedCheckpoint))
    if isinstance(error, OSError):
        return Failed(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    if is_communication_error(error):
        raise error
    return Failed(one_line(f"{type(error).__name__}: {error}")[:500])  # unraised it would leave the other ranks waiting


def attempt(work: Callable[[], _Value]) -> _Value | Failed:
    """Return the result of `work`, or its failure."""
    try:
        return work()
    except Exception as error:
        return failure_of(error)


@contextmanager
def noted_failure(failures: list[Failed]) -> Iterator[None]:
    """Go on after an error inside, which is added to the list."""
    try:
        yield
    except Exception as error:
        failures.append(failure_of(error))


def _raise(failed: Failed, problem: type[StateError] = CheckpointProblem) -> NoReturn:
    raise DamagedCheckpoint(failed.text) if failed.damaged else problem(failed.text)


class Rounds:
    """The ranks of a group, which call all of these methods together; `group` None: this process alone."""

    def __init__(self, group: dist.ProcessGroup | None, describe: Callable[[int], str]) -> None:
        self.group, self.describe = group, describe
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks on rank 0; on others an empty list."""
        if self.size == 1:
            return [value]
        out: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, out, dst=0, group=self.group)
        return out or []

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return the value of this rank, of those that rank 0 has."""
        if self.size == 1:
            return values[0]
        out: list[Any] = [None]
        dist.scatter_object_list(out, list(values) if self.rank == 0 else None, src=0, group=self.group)
        return out[0]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        if self.size == 1:
            return value
        out = [value]
        dist.broadcast_object_list(out, src=0, group=self.group)
        return out[0]

    def on_first(self, work: Callable[[], _Value]) -> _Value:
        """Return rank 0's result of `work`. CheckpointProblem on all ranks where it fails."""
        value: _Value | Failed = self.broadcast(attempt(work) if self.rank == 0 else None)
        return _raise(value) if isinstance(value, Failed) else value

    @contextmanager
    def together(self, problem: type[StateError] = CheckpointProblem) -> Iterator[None]:
        """Raise on all ranks, as this problem, what goes wrong on one of them inside."""
        failures: list[Failed] = []
        with noted_failure(failures):
            yield
        self.raise_first(failures, problem)

    def raise_first(self, failures: Sequence[Failed], problem: type[StateError] = CheckpointProblem) -> None:
        """Raise this problem on all ranks where one of them has failures: the first, with its rank; a damaged file names
        itself."""
        own = failures[0] if failures else None
        for rank, failed in enumerate([own] if self.size == 1 else gather(own, self.group)):
            if failed is not None:
                named = failed.damaged or self.size == 1
                _raise(failed if named else Failed(f"{self.describe(rank)}: {failed.text}"), problem)
