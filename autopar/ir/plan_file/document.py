"""The schema of ``plan.json``, one struct per object of the file. msgspec checks the types on load, `verify` what they mean."""

from __future__ import annotations

from typing import Any

import msgspec

SCHEMA_VERSION = 2
"""2: the field's words for keys (`conversions`, `recompute_nodes`, `factors`, ...). Files of another version are refused."""


class ModelInfo(msgspec.Struct, frozen=True):
    """`source` names what rebuilds the model: a bundled name, a config.json or ``file.py:factory``; empty for a given module."""

    name: str
    fingerprint: str
    params: int
    source: str = ""


class ClusterInfo(msgspec.Struct, frozen=True):
    """`name` is what `Cluster.parse` reads, `devices` the number of processes, `description` the hardware."""

    name: str
    devices: int
    description: dict[str, Any] = {}


class AxisInfo(msgspec.Struct, frozen=True):
    name: str
    size: int


class MeshInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The device mesh of one pipeline stage. State is sharded over `zero_group` neighbours on the data axis (0: all)."""

    axes: tuple[AxisInfo, ...]
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


class ScheduleInfo(msgspec.Struct, frozen=True):
    """The pipeline schedule; `name` is ``none`` without a pipeline. The other fields are those of `plan.Pipeline`."""

    name: str = "none"
    stages: int = 1
    virtual: int = 1
    layers: tuple[int, ...] = ()
    cuts: tuple[int, ...] = ()
    repeated: tuple[str, ...] = ()
    actions: str = ""
    weight_versions: int = 1


class StageInfo(msgspec.Struct, frozen=True):
    """One pipeline stage: its calls, by index in `graph.calls`, and its model chunks, both in the model's order."""

    calls: tuple[int, ...]
    chunks: tuple[int, ...] = (0,)


class PrecisionInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A `plan.Precision`."""

    compute: str
    master: str
    offload_optimizer: str = ""
    reduce: str = ""
    float8: bool = False


class OpInfo(msgspec.Struct, frozen=True):
    """A `plan.NodePlan`: placements are texts with one word per mesh axis (``S(0) R``)."""

    block: str
    node: str
    op: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    factors: tuple[str, ...]
    function: str = ""


class ConversionInfo(msgspec.Struct, frozen=True):
    value: str
    source: str
    target: str


class BlockInfo(msgspec.Struct, frozen=True):
    """A `plan.BlockPlan` without its nodes, which are in `ops`."""

    block: str
    zero: int
    recompute: bool
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    outputs: tuple[str, ...]
    conversions: tuple[ConversionInfo, ...]
    recompute_nodes: tuple[str, ...] = ()
    recompute_conversions: tuple[ConversionInfo, ...] = ()
    offload: tuple[tuple[str, str], ...] = ()
    partition_saved: tuple[tuple[str, str, str], ...] = ()


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
    """What the search found at one point of its grid. `bound_seconds` is a lower bound of every plan there (None: none fits),
    `reason` says why there is none."""

    mesh: str
    status: str
    bound_seconds: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    reason: str = ""


class FastestInfo(msgspec.Struct, frozen=True):
    plan: str
    step_seconds: float


class SearchInfo(msgspec.Struct, frozen=True):
    """The same question has the same file: how long the search took does not stand here. `cut_short` says what ended the search
    before its own limits, which are counts, did (its time limit, Ctrl-C): then another machine may find another plan."""

    candidates: int = 0
    status: str = ""
    meshes: tuple[MeshResult, ...] = ()
    fastest: FastestInfo | None = None
    cut_short: str = ""


class ValueDoc(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int | str, ...]
    dtype: str
    differentiable: bool = False


class NodeDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    op: str
    args: tuple[Any, ...]
    outputs: tuple[ValueDoc, ...]
    kwargs: dict[str, Any] = {}
    module: str = ""
    source: str = ""
    no_grad: bool = False


class ParameterDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    value: ValueDoc
    path: str
    trainable: bool = True
    buffer: bool = False
    expert_parallel: int = 1


class BlockDoc(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[ValueDoc, ...]
    parameters: tuple[ParameterDoc, ...]
    nodes: tuple[NodeDoc, ...]
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...] = ()


class CallDoc(msgspec.Struct, frozen=True):
    block: str
    prefix: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


class OutputDoc(msgspec.Struct, frozen=True):
    """A field of the model's result that the program returns beside the loss."""

    path: str
    value: str
    kind: str = "dtensor"


class ArgumentDoc(msgspec.Struct, frozen=True, omit_defaults=True):
    path: str
    input: str = ""
    constant: str = ""
    optional: bool = False
    batch_dim: int = 0


class InterfaceDoc(msgspec.Struct, frozen=True):
    """An `interface.Interface`; `left_out` names the fields of the result that come back as None."""

    positional: tuple[str, ...] = ()
    arguments: tuple[ArgumentDoc, ...] = ()
    returns: Any = None
    left_out: tuple[str, ...] = ()


class GraphDoc(msgspec.Struct, frozen=True):
    """A `graph.Graph`. `fingerprint` is of what it computes, `checksum` of all that stands here."""

    name: str
    inputs: tuple[ValueDoc, ...]
    blocks: tuple[BlockDoc, ...]
    calls: tuple[CallDoc, ...]
    loss: str
    batch: int
    fingerprint: str
    batch_is_symbolic: bool = True
    notes: tuple[str, ...] = ()
    outputs: tuple[OutputDoc, ...] = ()
    interface: InterfaceDoc | None = None
    checksum: str = ""


class PlanDocument(msgspec.Struct, frozen=True):
    """The whole file."""

    schema_version: int
    model: ModelInfo
    cluster: ClusterInfo
    mesh: MeshInfo
    parallelism: Parallelism
    batch: BatchInfo
    precision: PrecisionInfo
    optimizer: str
    schedule: ScheduleInfo
    stages: tuple[StageInfo, ...]
    blocks: tuple[BlockInfo, ...]
    ops: tuple[OpInfo, ...]
    recompute: tuple[str, ...]
    predicted: Predicted
    baselines: dict[str, Baseline | None]
    search: SearchInfo
    replicated_ops: tuple[str, ...]
    replicated_share: dict[str, float]
    graph: GraphDoc
