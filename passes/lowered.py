"""What lowering gives: blocks of one rank's sizes with conversions as operations, and all that the program's text needs."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Block, Call, Node, Value
from autopar.ir.interface import Interface
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Precision
from autopar.ir.schedule import Schedule
from autopar.ir.text import print_block


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter or buffer as it is stored: global shape, stored dtype, placement text per model axis where it is not ``I``."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    placements: tuple[tuple[str, str], ...] = ()
    trainable: bool = True
    buffer: bool = False


@dataclass(frozen=True, slots=True)
class LoweredBlock:
    """A block of local sizes; `specs` are in the order of ``block.parameters``.

    `recompute`: only the inputs are kept, the backward runs the forward once more. Finer: `again` are the values that the
    backward makes once more, `offload` those that are kept on the host.
    """

    block: Block
    specs: tuple[Spec, ...]
    zero: int
    recompute: bool = False
    again: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()

    @property
    def replays(self) -> bool:
        """Whether something is not simply kept."""
        return bool(self.again or self.offload)

    def runs_again(self, node: Node) -> bool:
        return any(value.name in self.again for value in node.outputs)


@dataclass(frozen=True, slots=True)
class LoweredChunk:
    """A run of calls of a pipeline: the values that it takes from the chunk before (`receives`) and hands to the one behind
    (`sends`; the last one: the loss and the outputs), with one rank's shapes."""

    calls: tuple[Call, ...]
    receives: tuple[Value, ...]
    sends: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class LoweredOutput:
    """What the program returns behind the loss: its path in the model's result, the value, and its placement text per axis where
    it is not equal on all ranks."""

    path: str
    value: str
    placements: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Lowered:
    """The program of one rank. `mesh` is that of one pipeline stage, `chunks` are all of them in the model's order, and
    `schedule` is what their ranks do, communication included (None: one stage). `batch` is the micro-batch of one data-parallel
    rank in the plan; `inputs` have local sizes.

    `totals` are the calls that run for every micro-batch before the first; each of their results is reduced over all of them
    (`total_ops`: sum, max or min) and then an input of the program, beside those of the batch.
    """

    name: str
    mesh: Mesh
    precision: Precision
    batch: int
    inputs: tuple[Value, ...]
    input_placements: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    blocks: tuple[LoweredBlock, ...]
    calls: tuple[Call, ...]
    loss: str
    fingerprint: str = ""
    micro_batches: int = 1
    zero_group: int = 0
    totals: tuple[Call, ...] = ()
    total_ops: tuple[str, ...] = ()
    chunks: tuple[LoweredChunk, ...] = ()
    schedule: Schedule | None = None
    weight_versions: int = 1
    outputs: tuple[LoweredOutput, ...] = ()
    interface: Interface | None = None

    @property
    def results(self) -> tuple[str, ...]:
        """What the program returns."""
        return (self.loss, *(output.value for output in self.outputs))

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return len(self.schedule.ranks) if self.schedule is not None else 1

    @property
    def devices(self) -> int:
        """Of all stages."""
        return self.mesh.size * self.stages

    @property
    def whole_mesh(self) -> str:
        """With the stages."""
        return str(self.mesh) if self.schedule is None else f"pp={self.stages} x {self.mesh}"

    @property
    def every_call(self) -> tuple[Call, ...]:
        """Those of all chunks, with what they repeat, and those that run before."""
        return (*(call for chunk in self.chunks for call in chunk.calls), *self.totals)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """All mesh axes with their sizes, the pipeline first."""
        own = tuple((axis.name, axis.size) for axis in self.mesh.axes)
        return own if self.schedule is None else (("pp", self.stages), *own)

    def block(self, name: str) -> LoweredBlock:
        return next(each for each in self.blocks if each.block.name == name)

    def __str__(self) -> str:
        calls = "".join(
            f"{', '.join(call.outputs)} = {call.block}[{call.prefix}]({', '.join(call.inputs)})\n" for call in self.calls
        )
        return "\n".join(print_block(each.block) for each in self.blocks) + "\n" + calls
