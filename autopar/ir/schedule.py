"""Pipeline schedules as data: an action is (model chunk, kind, micro-batch), a schedule has a tuple of actions for each rank.

The text of an action is that of ``torch.distributed.pipelining``: ``0F3``, ``1RECV_F0``, ``2UNSHARD``.
"""

from __future__ import annotations

from dataclasses import dataclass
from re import compile as pattern

from autopar.errors import PlanError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
COMPUTE = (FORWARD, BACKWARD, INPUT, WEIGHT)
TRANSFERS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
STATE = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
_TEXT = pattern(rf"(\d+)(?:({'|'.join((*COMPUTE, *TRANSFERS))})(\d+)|({'|'.join(STATE)}))")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """`kind`: F forward, B full backward; a split backward is I (input gradients) and W (weight gradients).

    p2p: ``SEND_F`` sends a chunk's outputs to the next chunk, ``RECV_F`` posts the receive of its inputs; ``SEND_B`` sends the
    gradients of its inputs to the chunk before, ``RECV_B`` posts the receive of those of its outputs. FSDP state: ``UNSHARD``,
    ``RESHARD``, ``REDUCE_GRAD`` (without micro-batch: -1).
    """

    chunk: int
    kind: str
    micro_batch: int = -1

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of a text like ``0F3``. PlanError where it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is no action: write chunk, kind and micro-batch like 0F0, 0B0, 0I0 or 0W0")
        chunk, kind, micro_batch, state = match.groups()
        return cls(int(chunk), state) if state else cls(int(chunk), kind, int(micro_batch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of each pipeline rank, in order. ``str()`` is one line per rank, which `parse` reads."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, rank)) for rank in self.ranks)

    @classmethod
    def parse(cls, text: str, name: str) -> Schedule:
        """The schedule of a text with one line per rank. PlanError names the rank and the word that cannot be read."""
        ranks = []
        for rank, line in enumerate(text.strip().splitlines()):
            actions = []
            for cell, word in enumerate(line.split()):
                try:
                    actions.append(Action.parse(word))
                except PlanError as error:
                    raise PlanError(f"schedule {name}, rank {rank}, cell {cell}: {error}") from None
            ranks.append(tuple(actions))
        return cls(name, tuple(ranks))

    @property
    def micro_batches(self) -> int:
        return 1 + max((action.micro_batch for rank in self.ranks for action in rank), default=-1)

    @property
    def chunks(self) -> int:
        """The number of model chunks."""
        return 1 + max((action.chunk for rank in self.ranks for action in rank), default=-1)

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of every chunk. PlanError where a chunk is on several ranks, or on none."""
        rank_of: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for chunk in dict.fromkeys(action.chunk for action in actions):
                if rank_of.setdefault(chunk, rank) != rank:
                    raise PlanError(f"schedule {self.name}: chunk {chunk} is on rank {rank_of[chunk]} and on rank {rank}")
        missing = [chunk for chunk in range(self.chunks) if chunk not in rank_of]
        if missing:
            raise PlanError(f"schedule {self.name}: chunk {missing[0]} is on no rank")
        return tuple(rank_of[chunk] for chunk in range(len(rank_of)))

    @property
    def splits_backward(self) -> bool:
        """Whether any backward is split into input and weight gradients."""
        return any(action.kind == WEIGHT for rank in self.ranks for action in rank)

    @property
    def compute(self) -> Schedule:
        """The schedule without p2p and state actions."""
        return Schedule(self.name, tuple(tuple(each for each in rank if each.kind in COMPUTE) for rank in self.ranks))
