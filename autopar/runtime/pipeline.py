"""Bases of a generated program in pipeline stages: chunks of the model, what goes between them, and the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from .actions import Action, parse
from .errors import LaunchProblem, RuntimeProblem
from .later import Queue
from .mesh import PIPELINE_AXIS, MeshHandle
from .module import Program, Root


@dataclass(frozen=True)
class Boundary:
    """A tensor that goes from one chunk to the next. `shape` is one rank's, of the examples of its micro-batch.

    Without `gradient` nothing comes back for it.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    dtype: str
    gradient: bool = True

    def empty(self, examples: int, device: torch.device) -> torch.Tensor:
        """Room for it."""
        return torch.empty(self.shape(examples), dtype=getattr(torch, self.dtype), device=device)


class Chunk(Root):
    """Some consecutive blocks of the model. `forward` takes by keyword what the chunk before returns (by the names of the
    boundary) and the inputs of the batch that `takes` names; it returns one tensor, or a tuple, and the last one the loss."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        self.queue = Queue()


class _Outside(Root):
    """Blocks of the program that are in no chunk: every rank has them."""

    def __init__(self, program: Pipeline) -> None:
        super().__init__(program.mesh)
        self.precision, self.position = program.precision, len(program.chunks)
        inside = {block for chunk in program.mine for block in chunk.blocks()}
        for index, block in enumerate(block for block in program.blocks() if block not in inside):
            self.add_module(str(index), block)


class Pipeline(Program):
    """The whole step in stages: this rank has the chunks whose forwards its line of `schedule` runs, in the order of the lines.

    `boundaries`: what goes from each chunk to the next. The chunks of other ranks are made too, on meta: their names and shapes
    are wanted where all ranks speak of all parameters.
    """

    chunks: ClassVar[tuple[type[Chunk], ...]] = ()
    boundaries: ClassVar[tuple[tuple[Boundary, ...], ...]] = ()
    schedule: ClassVar[tuple[str, ...]] = ()
    weight_versions: ClassVar[int] = 1

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        if mesh.pp.size != len(self.schedule):
            raise LaunchProblem(f"the schedule is for {len(self.schedule)} ranks, the mesh has {PIPELINE_AXIS}={mesh.pp.size}")
        every = [parse(line) for line in self.schedule]
        self.owners = _owners(every, len(self.chunks))
        self.actions: tuple[Action, ...] = every[mesh.pp.coordinate]
        everything = tuple(made(mesh) for made in self.chunks)
        for position, chunk in enumerate(everything):
            chunk.position, chunk.precision = position, self.precision
            if self.owners[position] == mesh.pp.coordinate:
                self.add_module(f"chunk_{position}", chunk)
                for block in chunk.blocks():
                    block.later = chunk.queue.of(block)
        self.__dict__["chunks_of_all"] = everything  # not registered: those of other ranks have no state

    @property
    def everything(self) -> tuple[Chunk, ...]:
        """All chunks in the model's order."""
        chunks: tuple[Chunk, ...] = self.__dict__["chunks_of_all"]
        return chunks

    @property
    def mine(self) -> tuple[Chunk, ...]:
        """This rank's chunks, in the model's order."""
        return tuple(chunk for chunk in self.everything if self.owners[chunk.position] == self.mesh.pp.coordinate)

    def examples(self, **inputs: torch.Tensor) -> int:
        """How many examples a micro-batch of one data rank has."""
        raise NotImplementedError

    def roots(self) -> tuple[tuple[Root, ...], ...]:
        outside = _Outside(self)
        shared = (outside,) if any(outside.blocks()) else ()
        ranks = range(len(self.schedule))
        return tuple((*(c for c in self.everything if self.owners[c.position] == rank), *shared) for rank in ranks)


def _owners(ranks: list[tuple[Action, ...]], chunks: int) -> tuple[int, ...]:
    """The rank of each chunk."""
    found = {action.chunk: rank for rank, actions in enumerate(ranks) for action in actions if action.kind == "F"}
    if sorted(found) != list(range(chunks)):
        raise RuntimeProblem(f"the schedule runs chunks {sorted(found)}, the program has {chunks}")
    return tuple(found[chunk] for chunk in range(chunks))
