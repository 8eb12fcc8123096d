"""The result of lowering: the program of one rank as data, from which `autopar.program` writes the text.

Shapes are local, placement conversions are operations, and all that the text says of mesh, inputs and schedule is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import Block, Call, Graph, Node, Value
from autopar.ir.plan import Candidate
from autopar.ir.schedule import Schedule
from autopar.ir.text import format_block
from autopar.passes.base import BlockState


@dataclass(frozen=True, slots=True)
class StoredParameter:
    """A parameter or buffer as stored: global shape, stored dtype, and (axis, placement) for the model axes that shard it."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...] = ()
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class LoweredBlock:
    """A block of local sizes as the last pass leaves it; `specs` are in the order of ``block.parameters``. `recompute`: full
    recomputation, only the inputs are saved for the backward."""

    state: BlockState
    specs: tuple[StoredParameter, ...]
    zero: int
    recompute: bool

    @property
    def block(self) -> Block:
        return self.state.block

    @property
    def selective(self) -> bool:
        """Whether recomputation, offload or partition is decided value by value."""
        return bool(self.state.recomputed or self.state.offloaded or self.state.partitioned)

    def recomputes(self, node: Node) -> bool:
        """Return whether the backward recomputes this node."""
        return any(value.name in self.state.recomputed for value in node.outputs)


@dataclass(frozen=True, slots=True)
class LoweredChunk:
    """A model chunk of a pipeline: its calls in order, the values that it receives from the previous chunk, and those that it
    sends to the next one (the last chunk: the loss and the outputs). Shapes are local."""

    calls: tuple[Call, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class LoweredOutput:
    """An output beside the loss: its path in the model's result, its value, and (axis, placement) where ranks of an axis hold
    different values."""

    path: str
    value: str
    placements: tuple[tuple[str, str], ...]
    kind: str = "dtensor"


@dataclass(frozen=True, slots=True)
class Lowered:
    """The program of one rank.

    Attributes:
        graph, candidate: the graph and its plan as they are cut into chunks, of global sizes.
        batch: the micro-batch of one data-parallel rank, in examples.
        uneven: data ranks have shards of the batch that differ by one example, of which `batch` is the largest.
        inputs: the inputs of the batch, with local shapes.
        total_calls: calls that run for all micro-batches before the first forward, for totals over the whole batch.
        totals: results of these calls, each with the operation (sum, max, min) that reduces it over the micro-batches; they are
            further inputs of the program.
        chunks: the model chunks of all stages in the model's order.
        schedule: the actions of each pipeline rank, communication included; None without a pipeline.
        outputs: what the program returns beside the loss.
    """

    graph: Graph
    candidate: Candidate
    batch: int
    inputs: tuple[Value, ...]
    input_placements: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    blocks: tuple[LoweredBlock, ...]
    total_calls: tuple[Call, ...] = ()
    totals: Mapping[str, str] = field(default_factory=dict)
    chunks: tuple[LoweredChunk, ...] = ()
    schedule: Schedule | None = None
    outputs: tuple[LoweredOutput, ...] = ()
    uneven: bool = False

    @property
    def whole_mesh(self) -> str:
        """The mesh as text, the pipeline axis included."""
        mesh, stages = self.candidate.mesh, self.candidate.pipeline.stages
        return str(mesh) if stages == 1 else f"pp={stages} x {mesh}"

    @property
    def all_calls(self) -> tuple[Call, ...]:
        """The calls of all chunks, those that several chunks repeat included, and the calls of totals."""
        return (*(call for chunk in self.chunks for call in chunk.calls), *self.total_calls)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """All mesh axes with their sizes, the pipeline axis first."""
        own = tuple((axis.name, axis.size) for axis in self.candidate.mesh.axes)
        return own if self.schedule is None else (("pp", self.candidate.pipeline.stages), *own)

    def block(self, name: str) -> LoweredBlock:
        return next(each for each in self.blocks if each.block.name == name)

    def __str__(self) -> str:
        calls = "".join(
            f"{', '.join(call.outputs)} = {call.block}[{call.prefix}]({', '.join(call.inputs)})\n" for call in self.graph.calls
        )
        return "\n".join(format_block(each.block) for each in self.blocks) + "\n" + calls
