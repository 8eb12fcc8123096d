"""Base classes of a generated pipeline: model chunks, the tensors between them, and the program of one stage.

The text of a schedule has the actions of one rank, in the order in which it runs them (torch's notation):

| text | action |
|---|---|
| ``0F3`` | forward of micro-batch 3 on model chunk 0 |
| ``0B3`` | its backward |
| ``0I3``, ``0W3`` | the split backward: gradients of the inputs, gradients of the weights |
| ``0SEND_F3``, ``1RECV_F3`` | chunk 0 sends its results; chunk 1 posts their receive |
| ``1SEND_B3``, ``0RECV_B3`` | chunk 1 sends the gradients of its inputs; chunk 0 posts their receive |
| ``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD`` | all-gather the weights of chunk 0, free them; reduce-scatter their gradients |
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..device.mesh import PIPELINE_AXIS, MeshHandle
from ..errors import LaunchProblem, RuntimeProblem
from ..module import Program, RootModule
from ..ops.split_backward import WeightGradQueue


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that one model chunk passes to the next. `shape`: its local shape, a function of the micro-batch size.

    Without `gradient` no gradient comes back for it.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    dtype: str
    gradient: bool = True

    def empty(self, examples: int, device: torch.device) -> torch.Tensor:
        """An uninitialised buffer for it."""
        return torch.empty(self.shape(examples), dtype=getattr(torch, self.dtype), device=device)


class ModelChunk(RootModule):
    """Consecutive blocks of the model. `forward` takes by keyword what the chunk before returns (by the names of the boundary)
    and the inputs of the batch that `batch_inputs` names; it returns one tensor or a tuple, and the last chunk the loss."""

    batch_inputs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        self.weight_grads = WeightGradQueue()


class _CommonBlocks(RootModule):
    """Blocks of the program that are in no model chunk: every rank has them."""

    def __init__(self, program: PipelineProgram) -> None:
        super().__init__(program.mesh)
        self.precision, self.position = program.precision, len(program.chunks)
        self.reduce_dtype = program.reduce_dtype
        inside = {block for chunk in program.own_chunks for block in chunk.blocks()}
        for index, block in enumerate(block for block in program.blocks() if block not in inside):
            self.add_module(str(index), block)


class PipelineProgram(Program):
    """The program of one stage: this rank holds the model chunks whose forwards its line of `schedule` runs; one line a stage.

    `boundaries`: the tensors between consecutive chunks. The chunks of other stages are constructed too, on meta, since all ranks
    need the names and shapes of all parameters.
    """

    chunks: ClassVar[tuple[type[ModelChunk], ...]] = ()
    boundaries: ClassVar[tuple[tuple[BoundaryTensor, ...], ...]] = ()
    schedule: ClassVar[tuple[str, ...]] = ()

    def __init__(self, mesh: MeshHandle) -> None:
        super().__init__(mesh)
        if mesh.pp.size != len(self.schedule):
            raise LaunchProblem(f"the schedule is for {len(self.schedule)} ranks, the mesh has {PIPELINE_AXIS}={mesh.pp.size}")
        every = [parse_actions(line) for line in self.schedule]
        self.chunk_stages = _chunk_stages(every, len(self.chunks))
        self.actions: tuple[RankAction, ...] = every[mesh.pp.coordinate]
        chunks = tuple(kind(mesh) for kind in self.chunks)
        for position, chunk in enumerate(chunks):
            chunk.position, chunk.precision, chunk.reduce_dtype = position, self.precision, self.reduce_dtype
            if self.chunk_stages[position] == mesh.pp.coordinate:
                self.add_module(f"chunk_{position}", chunk)
                for block in chunk.blocks():
                    block.split_backward = chunk.weight_grads.for_block(block)
        self.__dict__["chunks_of_all"] = chunks  # not registered: those of other ranks have no state

    @property
    def all_chunks(self) -> tuple[ModelChunk, ...]:
        """All model chunks in the model's order."""
        chunks: tuple[ModelChunk, ...] = self.__dict__["chunks_of_all"]
        return chunks

    @property
    def own_chunks(self) -> tuple[ModelChunk, ...]:
        """This rank's model chunks in the model's order."""
        return tuple(chunk for chunk in self.all_chunks if self.chunk_stages[chunk.position] == self.mesh.pp.coordinate)

    def micro_batch_size(self, **inputs: torch.Tensor) -> int:
        """The examples of one micro-batch on one data-parallel rank."""
        raise NotImplementedError

    def roots(self) -> tuple[tuple[RootModule, ...], ...]:
        outside = _CommonBlocks(self)
        shared = (outside,) if any(outside.blocks()) else ()
        ranks = range(len(self.schedule))
        return tuple((*(c for c in self.all_chunks if self.chunk_stages[c.position] == rank), *shared) for rank in ranks)


def _chunk_stages(ranks: list[tuple[RankAction, ...]], chunks: int) -> tuple[int, ...]:
    """The stage of each model chunk."""
    stages = {action.chunk: rank for rank, actions in enumerate(ranks) for action in actions if action.kind == "F"}
    if sorted(stages) != list(range(chunks)):
        raise RuntimeProblem(f"the schedule runs chunks {sorted(stages)}, the program has {chunks}")
    return tuple(stages[chunk] for chunk in range(chunks))


COMPUTE = ("F", "B", "I", "W")
BACKWARD = ("B", "I", "W")
FORWARD_ONLY = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")

_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)|(\d+)(UNSHARD|RESHARD|REDUCE_GRAD)")


class RankAction(NamedTuple):
    """One action of one rank; `micro_batch` is -1 if it has none."""

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind}{self.micro_batch if self.micro_batch >= 0 else ''}"


def parse_actions(text: str) -> tuple[RankAction, ...]:
    """The actions of one rank. RuntimeProblem for a word that is not an action."""
    return tuple(_action(word) for word in text.split())


def _action(word: str) -> RankAction:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise RuntimeProblem(f"{word!r} is not an action of a schedule; write for example 0F3, 1RECV_F3 or 0REDUCE_GRAD")
    chunk, kind, number, other, zero = match.groups()
    return RankAction(int(chunk), kind, int(number)) if kind else RankAction(int(other), zero, -1)
