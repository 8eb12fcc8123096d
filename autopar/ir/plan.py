"""A parallelization plan as data: per operation the placements of operands and results, per value the placement conversions
(redistribute), per block the ZeRO stage, recomputation and offload, and the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.mesh import Mesh
from autopar.ir.names import Actions, Dtype, Name, ScheduleName
from autopar.ir.placement import Placements


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One operation on the mesh. `operands` and `results` are placements in the order of `Node.operands()` and outputs.

    `factors` names, per mesh axis, the factor that is sharded (``n``, ``k``), ``redundant`` (every rank computes the same), or
    ``pass`` (a Partial goes in and a Partial comes out). `function` is the named function that replaces the operation
    (``ap.embedding_sharded``); it is empty where the operation itself runs on local shards.
    """

    node: str
    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    factors: tuple[str, ...]
    function: str = ""


@dataclass(frozen=True, slots=True)
class Conversion:
    """A placement conversion of one value, which changes exactly one mesh axis. The conversions of a value form a tree; its root
    is the placement in which the value is produced."""

    value: Name
    source: Placements
    target: Placements


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A distinct block. `inputs`, `parameters`, `outputs` are the placements at its boundary; parameters as they are stored.

    A value of the graph has one placement between blocks: the producing block converts to it, each consuming block from it.
    `zero` is the ZeRO stage on the data axis: 0 everything replicated, 1 optimizer state sharded, 2 gradients too, 3 parameters
    too (FSDP).
    `recompute`: full activation checkpointing; only the block's inputs are saved, and the backward recomputes its forward.
    Selective recomputation instead names single nodes (`recompute_nodes`) and conversions (`recompute_conversions`) that the
    backward recomputes: their results are not saved, their operands are. `offload` are the saved tensors that are offloaded to
    host memory, as (value, placements). `partition_saved` are those of which each rank of a model axis, on which they are
    replicated, saves one part until the backward gathers them (ZeRO-R), as (value, placements, axis).
    """

    block: Name
    inputs: tuple[Placements, ...]
    parameters: tuple[Placements, ...]
    outputs: tuple[Placements, ...]
    nodes: tuple[NodePlan, ...]
    conversions: tuple[Conversion, ...]
    zero: int
    recompute: bool = False
    recompute_nodes: tuple[Name, ...] = ()
    recompute_conversions: tuple[Conversion, ...] = ()
    offload: tuple[tuple[Name, Placements], ...] = ()
    partition_saved: tuple[tuple[Name, Placements, Name], ...] = ()


OFFLOAD_DEVICES = ("cpu", "nvme")
"""The places where optimizer state may lie between steps, beside the device."""


REDUCTIONS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes in which gradients may be summed."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a step and the place of its state: `compute` is the dtype of forward and backward, `master` that of the
    stored parameters and their gradients. `offload_optimizer` is where the optimizer's state lies between steps: ``cpu`` (host
    memory), ``nvme``, or empty (on the device). `reduce` is the dtype in which gradients are summed over the data axis (FSDP2's
    ``reduce_dtype``); empty: `master`. With `float8` the linear modules of layers multiply in float8 (operands and results are of
    the dtype `compute`)."""

    compute: Dtype = "float32"
    master: Dtype = "float32"
    offload_optimizer: str = ""
    reduce: str = ""
    float8: bool = False

    @property
    def reduction(self) -> str:
        """The dtype of gradients on the wire."""
        return self.reduce or self.master


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of `stages` ranks, each with `virtual` model chunks of consecutive calls; `schedule` is its name (``1f1b``).

    `cuts` are the first calls of all chunks but the first one; or `layers` says how many layers each chunk has, in the model's
    order; without both, layers are distributed evenly. `repeated` are values of the graph without gradient that every chunk
    computes itself instead of receiving them. `actions` is the text of a schedule that has no builder of that name, one line per
    stage. `weight_versions` is 2 where gradients belong to the weights before the last update (PipeDream-2BW, arXiv 2006.09503).
    """

    stages: int = 1
    virtual: int = 1
    schedule: ScheduleName = "1f1b"
    layers: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    repeated: tuple[Name, ...] = ()
    actions: Actions = ""
    weight_versions: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device mesh and the block plans on it: what the evaluator, the passes and the program read.

    `batch` is the global batch, in `micro_batches` equal parts. The mesh is that of one pipeline stage; all stages together are
    the cluster. State is sharded over groups of `zero_group` neighbours on the data axis (0: over the whole axis) and replicated
    between the groups (hybrid sharding, HSDP).
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
        """The number of devices of all pipeline stages."""
        return self.mesh.size * self.pipeline.stages

    def block(self, name: str) -> BlockPlan:
        return next(block for block in self.blocks if block.block == name)
