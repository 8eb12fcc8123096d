"""The messages between ranks while a checkpoint is saved or loaded. What goes wrong on one rank is told to all, and raised on
all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..comm.beats import is_communication_error
from ..errors import CheckpointProblem, DamagedCheckpoint, RuntimeProblem, one_line

_Value = TypeVar("_Value")


class Failed(NamedTuple):
    """A failure in place of a value: what went wrong in making it. `damaged`: with the files, so that another checkpoint may
    do."""

    text: str
    damaged: bool = False


def attempt(work: Callable[[], _Value]) -> _Value | Failed:
    """Return the result of `work`, or its failure. The loss of another rank is raised."""
    try:
        return work()
    except RuntimeProblem as error:
        return Failed(str(error), isinstance(error, DamagedCheckpoint))
    except OSError as error:
        return Failed(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
    except Exception as error:  # it would leave the other ranks waiting
        if is_communication_error(error):
            raise
        return Failed(one_line(f"{type(error).__name__}: {error}")[:500])


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

    def gather_all(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        if self.size == 1:
            return [value]
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value, group=self.group)
        return out

    def scatter(self, values: Sequence[Any]) -> Any:
        """Return the value of this rank, of those that rank 0 has."""
        if self.size == 1:
            return values[0]
        out: list[Any] = [None]
        dist.scatter_object_list(out, list(values) if self.rank == 0 else None, src=0, group=self.group)
        return out[0]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.size == 1:
            return value
        out = [value]
        dist.broadcast_object_list(out, src=0, group=self.group)
        return out[0]

    def first_failure(self, values: Iterable[Any]) -> Failed | None:
        """Return the first failure of the values of all ranks, with its rank; a damaged file names itself."""
        for rank, value in enumerate(values):
            if isinstance(value, Failed):
                return value if value.damaged or self.size == 1 else Failed(f"{self.describe(rank)}: {value.text}")
        return None

    def raise_together(self, value: Any) -> None:
        """CheckpointProblem on all ranks where the value of one of them is `Failed`."""
        failed = self.first_failure(self.gather_all(value if isinstance(value, Failed) else None))
        if failed is not None:
            raise DamagedCheckpoint(failed.text) if failed.damaged else CheckpointProblem(failed.text)
