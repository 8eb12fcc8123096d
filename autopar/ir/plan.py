"""What the solver decided: placements per value, arcs per conversion, state sharding per block."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One operation on the mesh. `operands` and `results` are placements in the order of `Node.operands()` and outputs.

    `label` names, per axis, the factor that is sharded (``n``, ``k``), ``redundant``, or ``pass`` (a Partial handed on).
    `function` is the named function that replaces the op (``ap.embedding_sharded``), empty where the op itself runs on shards.
    """

    node: str
    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    label: tuple[str, ...]
    function: str = ""


@dataclass(frozen=True, slots=True)
class Arc:
    """A conversion of one value that changes exactly one axis. The arcs of a value form a tree rooted where it is produced."""

    value: str
    source: Placements
    target: Placements


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A distinct block. `inputs`, `parameters`, `outputs` are the placements at its boundary; parameters as they are stored.

    A graph value has one placement between blocks: the producer converts to it, consumers convert from it, inside.
    `zero` is the state sharding on the data axis: 0 replicated, 1 optimizer, 2 and gradients, 3 and parameters.
    `recompute`: only the inputs are kept; the backward runs the forward once more. Finer, and not beside it: `again` names the
    nodes and `again_arcs` the conversions that the backward runs once more; what they produce is not kept, and what they
    need is. `offload` are the kept tensors that wait on the host, as (value, placements).
    """

    block: str
    inputs: tuple[Placements, ...]
    parameters: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    nodes: tuple[NodePlan, ...]
    arcs: tuple[Arc, ...]
    zero: int
    recompute: bool = False
    again: tuple[str, ...] = ()
    again_arcs: tuple[Arc, ...] = ()
    offload: tuple[tuple[str, Placements], ...] = ()


@dataclass(frozen=True, slots=True)
class Precision:
    """`compute` is the dtype of forward and backward, `master` of the stored parameters and gradients' reduction."""

    compute: str = "float32"
    master: str = "float32"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """`stages` in a row, each of `virtual` chunks of consecutive calls; `schedule` as the field names it.

    `cuts` are the first calls of all chunks but the first one, or `layers` of each chunk in the model's order; without both,
    layers are dealt evenly. `repeated` are graph values without gradient that every chunk makes for itself instead of receiving
    them. `actions` is the text of a schedule that no builder makes by its name, a line for each stage. `weight_versions`: 2 if
    gradients are those of the weights before the last update (PipeDream-2BW, arXiv 2006.09503).
    """

    stages: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    layers: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    repeated: tuple[str, ...] = ()
    actions: str = ""
    weight_versions: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mesh and the block plans on it: what evaluator, passes and program read.

    `batch` is the global one, taken in `micro_batches` parts. The mesh is that of one pipeline stage; all stages together are
    the cluster. State is sharded over `zero_group` neighbours on the data axis (0: over all of it) and equal between such groups.
    """

    mesh: Mesh
    blocks: tuple[BlockPlan, ...]
    batch: int
    precision: Precision
    micro_batches: int = 1
    zero_group: int = 0
    pipeline: Pipeline = Pipeline()

    @property
    def micro_batch(self) -> int:
        """Examples of one micro-batch, of all data ranks together."""
        return -(-self.batch // self.micro_batches)

    @property
    def devices(self) -> int:
        """Of all stages."""
        return self.mesh.size * self.pipeline.stages

    def block(self, name: str) -> BlockPlan:
        return next(block for block in self.blocks if block.block == name)


@dataclass(frozen=True, slots=True)
class Solution:
    """A candidate with its graph: all that is needed to build the program."""

    graph: Graph
    candidate: Candidate
