"""The schema of ``plan.json``: `PlanDocument` holds classes of the IR (see `codec`) and what only the file has.

msgspec checks the types on load, names and dtypes among them (`ir.names`), `verify` what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis
from autopar.ir.names import Function, Line, Name, Op
from autopar.ir.placement import Placements
from autopar.ir.plan import BlockPlan, Candidate, NodePlan, Pipeline, Precision


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that an operation saves for its backward, and its workspace.

    operands, results: which of them are saved.
    extra_ratio: bytes of other saved tensors, as a multiple of the bytes of `extra_reference`: the index of an operand, or
        ``-1 - index`` of a result.
    forward_workspace_ratio, backward_workspace_ratio: bytes that the operation allocates while it runs, beside operands, results,
        their gradients and saved tensors, as multiples of the bytes of `workspace_reference` (an index as above).
    known: false where torch could not run the operation: then everything is taken to be saved.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_ratio: float = 0.0
    extra_reference: int = 0
    known: bool = True
    forward_workspace_ratio: float = 0.0
    backward_workspace_ratio: float = 0.0
    workspace_reference: int = 0


SCHEMA_VERSION = 2
"""2: the field's words for keys (`conversions`, `recompute_nodes`, `factors`, ...). Files of another version are refused."""


class ModelInfo(msgspec.Struct, frozen=True):
    """`source` names what rebuilds the model: a bundled name, a config.json or ``file.py:factory``; empty for a given module."""

    name: Line
    fingerprint: str
    params: int
    source: Line = ""


class ClusterInfo(msgspec.Struct, frozen=True):
    """`name` is what `Cluster.parse` reads, `devices` the number of processes, `description` the hardware."""

    name: Line
    devices: int
    description: dict[str, Any] = {}

    @property
    def compiled(self) -> bool:
        """True where prices are those of blocks under torch.compile."""
        return bool(self.description.get("device", {}).get("fused"))


class MeshInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The device mesh of one pipeline stage. State is sharded over `zero_group` neighbours on the data axis (0: all)."""

    axes: tuple[Axis, ...]
    zero_group: int = 0


class Parallelism(msgspec.Struct, frozen=True):
    """The named degrees of the plan: data, tensor, pipeline, context and expert parallelism, the ZeRO stage of most parameters,
    and the model chunks of each pipeline stage (`virtual_stages`). For people only: the compiler reads placements."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    virtual_stages: int = 1


class BatchInfo(msgspec.Struct, frozen=True):
    """`global` is the number of examples of an optimizer step, `micro` that of one micro-batch on one data rank, `seq` the tokens
    of an example, or None."""

    global_: int = msgspec.field(name="global")
    micro: int
    num_microbatches: int = 1
    seq: int | None = None


class StageInfo(msgspec.Struct, frozen=True):
    """One pipeline stage: its calls, by index in `graph.calls`, and its model chunks, both in the model's order."""

    calls: tuple[int, ...]
    chunks: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class OpInfo:
    """A `plan.NodePlan` with its block and operation."""

    block: Name
    node: Name
    op: Op
    operands: tuple[Placements, ...]
    results: tuple[Placements, ...]
    factors: tuple[Line, ...]
    function: Function = ""


class Predicted(msgspec.Struct, frozen=True):
    """The predicted cost of a step. `mfu` counts the model's FLOPs, without recomputation; `gap` is the relative distance to
    `lower_bound_seconds`; `bubble_share` is the share of the step in which a pipeline stage is idle, on average. The peak is at
    most `memory_capacity_bytes` of the device without the share `memory_margin` (None in files of an older autopar).
    `samples_per_second` are examples of the whole cluster; `tokens_per_second_per_device` is None where they are no sequences of
    tokens."""

    step_seconds: float | None = None
    tokens_per_second_per_device: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    lower_bound_seconds: float | None = None
    gap: float | None = None
    memory: dict[str, int] = {}
    bubble_share: float = 0.0
    memory_capacity_bytes: int | None = None
    memory_margin: float | None = None
    samples_per_second: float | None = None


class Baseline(msgspec.Struct, frozen=True):
    """A usual hand-written configuration (`title`, as `configuration`) on the same cluster, priced by the same evaluator with the
    constants of `software` (empty: those of our own programs). `own_step_seconds` is the recipe on our own programs, where that
    fits. `memory` says whether the peak fits with the margin, without it, with tensors alone, or not. `shortfall_bytes` is the
    memory that a device lacks for it; `problem` says why it is impossible (then it has no price).
    `measured` is a published run of it in words, `measured_seconds` its step where batch and precision are the plan's; `reason`
    says by how much and why it is faster than the plan, where it is.
    """

    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    fits: bool = True
    title: str = ""
    configuration: str = ""
    shortfall_bytes: int = 0
    problem: str = ""
    software: str = ""
    own_step_seconds: float | None = None
    measured: str = ""
    measured_seconds: float | None = None
    reason: str = ""
    memory: str = ""


class MeshResult(msgspec.Struct, frozen=True):
    """The result of the search at one point of its grid. `bound_seconds` is a lower bound of every plan there (None: none fits),
    `reason` says why there is none."""

    mesh: str
    status: str
    bound_seconds: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    reason: str = ""


class FastestInfo(msgspec.Struct, frozen=True):
    plan: Line
    step_seconds: float


class SearchInfo(msgspec.Struct, frozen=True):
    """The same question has the same file: how long the search took does not stand here. `cut_short` says what ended the search
    before its own limits, which are counts, did (its time limit, Ctrl-C): then another machine may find another plan.
    `constrained`: the placements that were pinned, by name and mesh axis."""

    candidates: int = 0
    status: str = ""
    meshes: tuple[MeshResult, ...] = ()
    fastest: FastestInfo | None = None
    cut_short: Line = ""
    constrained: dict[Line, dict[Name, Line]] = {}


class InferenceInfo(msgspec.Struct, frozen=True):
    """The prediction of a plan for inference, whose step is the prefill of a prompt: seconds of that, of one decoded token of
    every sequence (None: nothing is decoded), and to the last of `new_tokens`, with a lower bound; new tokens a second of all
    sequences; the key-value cache of a device, and its peak memory while it decodes."""

    new_tokens: int
    prefill_seconds: float
    decode_seconds: float | None
    latency_seconds: float
    latency_bound_seconds: float
    new_tokens_per_second: float
    cache_bytes: int
    decode_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class PlanDocument:
    """The whole file. `blocks` are without their nodes, which `ops` has; the `schedule` of one stage is called ``none``. `saves`:
    what autograd was observed to save of the graph's operations, so that who reads the file needs no torch (with a checksum)."""

    schema_version: int
    model: ModelInfo
    cluster: ClusterInfo
    mesh: MeshInfo
    parallelism: Parallelism
    batch: BatchInfo
    precision: Precision
    optimizer: Line
    schedule: Pipeline
    stages: tuple[StageInfo, ...]
    blocks: tuple[BlockPlan, ...]
    ops: tuple[OpInfo, ...]
    recompute: tuple[str, ...]
    predicted: Predicted
    baselines: dict[str, Baseline | None]
    search: SearchInfo
    replicated_ops: tuple[str, ...]
    replicated_share: dict[str, float]
    graph: Graph
    saves: dict[str, SavedTensors] = field(default_factory=dict)
    saves_checksum: str = ""
    inference: InferenceInfo | None = None


def divide_blocks(graph: Graph, candidate: Candidate) -> tuple[tuple[BlockPlan, ...], tuple[OpInfo, ...]]:
    """The block plans without their nodes, and the node plans of all blocks in one flat table."""
    ops = {(block.name, node.name): node.op for block in graph.blocks for node in block.nodes}
    table = (
        OpInfo(
            plan.block, each.node, ops.get((plan.block, each.node), ""), each.operands, each.results, each.factors, each.function
        )
        for plan in candidate.blocks
        for each in plan.nodes
    )
    return tuple(replace(plan, nodes=()) for plan in candidate.blocks), tuple(table)


def join_blocks(blocks: Sequence[BlockPlan], ops: Sequence[OpInfo]) -> tuple[BlockPlan, ...]:
    """The inverse of `divide_blocks`."""
    nodes: dict[str, list[NodePlan]] = {plan.block: [] for plan in blocks}
    for op in ops:
        if op.block not in nodes:
            raise ValueError(f"ops name the block {op.block!r}, which is not in `blocks`")
        nodes[op.block].append(NodePlan(op.node, op.operands, op.results, op.factors, op.function))
    return tuple(replace(plan, nodes=tuple(nodes[plan.block])) for plan in blocks)
