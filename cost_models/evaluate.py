"""Prices a candidate by simulating its program call by call: the word that every plan is judged by, also the solver's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.devices import Device
from autopar.cost_models.hardware import Cluster, check_mesh
from autopar.cost_models.stage_groups import stage_parts
from autopar.cost_models.stage_memory import StageMemory, stage_memories
from autopar.cost_models.stages import Chunk, StageTime, chunks, stage_times
from autopar.cost_models.state import StateCost, optimizer_named
from autopar.cost_models.trace import Run
from autopar.ir.chunks import chunks_of_ranks
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate


@dataclass(frozen=True, slots=True)
class BlockTime:
    """One call of a distinct block, alone: computing, and communication that it waits for, forward and backward."""

    block: str
    calls: int
    compute_forward_seconds: float
    compute_backward_seconds: float
    exposed_forward_seconds: float
    exposed_backward_seconds: float
    gather_seconds: float
    reduce_seconds: float
    kept_bytes: float
    zero: int
    gather_bytes: float = 0.0
    reduce_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on the clock of its stage, in the first forward and in the last backward of a step. `*_waited_seconds` is what it
    stood still for gathers and reductions on the data axis."""

    block: str
    prefix: str
    forward_start_seconds: float
    forward_seconds: float
    forward_waited_seconds: float
    backward_start_seconds: float
    backward_seconds: float
    backward_waited_seconds: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What a step of a candidate costs, all micro-batches together. Seconds are those of the stage that ends last: compute,
    exposed, waited, bubble and optimizer seconds add up to the step, and so do forward, backward, bubble and optimizer.
    `axis_seconds` is the time that each axis communicates (hidden or not), `redundant_share` the share of FLOPs that every rank
    of an axis repeats, `model_flops` those of one step over all devices (no recomputation, causal attention counted by half).
    `blocks` and `calls` are of one micro-batch. `memory` is the table of the fullest stage, `stage_memory` that of each."""

    step_seconds: float
    forward_seconds: float
    backward_seconds: float
    optimizer_seconds: float
    compute_seconds: float
    exposed_seconds: float
    waited_seconds: float
    axis_seconds: tuple[tuple[str, float], ...]
    redundant_share: tuple[tuple[str, float], ...]
    model_flops: float
    tflops_per_device: float
    mfu: float
    peak_memory_bytes: int
    memory: tuple[tuple[str, int], ...]
    memory_capacity_bytes: int
    blocks: tuple[BlockTime, ...]
    calls: tuple[CallTime, ...]
    micro_batches: int = 1
    bubble_seconds: float = 0.0
    stages: tuple[StageTime, ...] = ()
    stage_memory: tuple[StageMemory, ...] = ()

    @property
    def bubble_share(self) -> float:
        """What stages stand still for each other, on average, as a share of the step."""
        if not self.stages or not self.step_seconds:
            return 0.0
        return sum(stage.bubble_seconds for stage in self.stages) / len(self.stages) / self.step_seconds

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_capacity_bytes


def evaluate(
    graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str = "adamw", costs: Mapping[str, BlockCosts] | None = None
) -> Evaluation:
    """Simulates one training step of `candidate`. ClusterError where the mesh is not the cluster's size.

    `costs` are the blocks' price tables by name, where the caller has them for this graph, mesh, batch and cluster already.
    """
    runs = stage_runs(graph, candidate, cluster, costs)
    made = chunks(graph, candidate, cluster, runs, optimizer_named(optimizer))
    stages = stage_times(graph, candidate, cluster, runs, made)
    memory = stage_memories(graph, candidate, cluster, runs, [chunk.owned for chunk in made])
    return _summary(graph, candidate, cluster, runs, made, stages, memory)


def stage_runs(
    graph: Graph, candidate: Candidate, cluster: Cluster, costs: Mapping[str, BlockCosts] | None = None
) -> list[dict[str, Run]]:
    """One call of each block by name, on the devices of each stage."""
    parts = stage_parts(cluster, candidate.pipeline.stages)
    check_mesh(parts[0], candidate.mesh)
    found: dict[Device, dict[str, Run]] = {}
    for part in parts:
        if part.device not in found:
            found[part.device] = _runs(graph, candidate, part, (costs or {}) if part.device == cluster.device else {})
    return [found[part.device] for part in parts]


def _runs(graph: Graph, candidate: Candidate, part: Cluster, costs: Mapping[str, BlockCosts]) -> dict[str, Run]:
    """Every block on the devices of one stage."""
    return {
        block.name: Run.of(
            costs.get(block.name) or BlockCosts(block, candidate.mesh, candidate.micro_batch, part, candidate.zero_group),
            candidate.block(block.name),
        )
        for block in graph.blocks
    }


def _summary(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    runs_of: Sequence[Mapping[str, Run]],
    made: Sequence[Chunk],
    stages: Sequence[StageTime],
    memory: Sequence[StageMemory],
) -> Evaluation:
    counts, many = Counter(call.block for call in graph.calls), candidate.micro_batches
    mesh, places = candidate.mesh, chunks_of_ranks(candidate.pipeline)
    peak = sum(
        part.device.peak_flops_per_second(candidate.precision.compute) for part in stage_parts(cluster, len(stages))
    ) / len(stages)
    fullest = max(memory, key=lambda each: each.peak_bytes - each.capacity_bytes)
    slowest = max(range(len(stages)), key=lambda index: stages[index].end_seconds)
    runs = runs_of[slowest]
    stage, mine = stages[slowest], [made[index] for index in places[slowest]]
    own = Counter(graph.calls[index].block for index in stage.calls)

    def total(of: Callable[[Run], float], calls: Mapping[str, int]) -> float:
        return many * sum(count * of(runs[name]) for name, count in calls.items())

    def time(run: Run, exposed: bool) -> float:
        return run.total(backward=False, exposed=exposed) + run.total(backward=True, exposed=exposed)

    flops, model_flops = total(lambda run: run.flops, counts), total(lambda run: run.model_flops, counts)
    axes = [total(lambda run, axis=axis: run.axis_seconds[axis], own) for axis in range(len(mesh.sizes))]  # type: ignore[misc]
    traffic = [moved for chunk in mine for moved in chunk.traffic]
    axes[mesh.index(DATA_AXIS)] += sum(moved.data_axis_seconds(many) for moved in traffic)
    redundant = [total(lambda run, axis=axis: run.redundant_flops[axis], counts) for axis in range(len(mesh.sizes))]  # type: ignore[misc]
    compute = total(lambda run: time(run, False), own) + many * sum(moved.accumulate_seconds for moved in traffic)
    exposed = total(lambda run: time(run, True), own)
    ran = stage.busy_seconds + stage.tail_seconds
    forward = sum(chunk.steps.forward_seconds for chunk in mine)
    per_device = model_flops / stage.end_seconds / candidate.devices if stage.end_seconds else 0.0
    states = {index: state for chunk in made for index, state in zip(chunk.owned.calls, chunk.owned.states, strict=True)}
    first = {call.block: index for index, call in reversed(list(enumerate(graph.calls)))}
    return Evaluation(
        stage.end_seconds,
        forward,
        ran - forward,
        stage.optimizer_seconds,
        compute,
        exposed,
        mine[0].steps.waited_seconds if len(made) == 1 else max(0.0, ran - compute - exposed),
        tuple(zip(mesh.names, axes, strict=True)),
        tuple((name, share / flops if flops else 0.0) for name, share in zip(mesh.names, redundant, strict=True)),
        model_flops,
        per_device / 1e12,
        per_device / peak,
        fullest.peak_bytes,
        tuple(fullest.table.items()),
        fullest.capacity_bytes,
        tuple(
            _block_time(runs[block.name], counts[block.name], states[first[block.name]])
            for block in graph.blocks
            if block.name in first
        ),
        tuple(each for chunk in made for each in _call_times(graph, chunk)),
        many,
        stage.bubble_seconds,
        tuple(stages),
        tuple(memory),
    )


def _call_times(graph: Graph, chunk: Chunk) -> Iterator[CallTime]:
    readings = zip(chunk.owned.calls, chunk.steps.first_forward.calls, chunk.steps.last_backward.calls, strict=True)
    for index, forward, backward in readings:
        call = graph.calls[index]
        yield CallTime(call.block, call.prefix, *forward, *backward)


def _block_time(run: Run, calls: int, state: StateCost) -> BlockTime:
    return BlockTime(
        run.plan.block,
        calls,
        run.total(backward=False, exposed=False),
        run.total(backward=True, exposed=False),
        run.total(backward=False, exposed=True),
        run.total(backward=True, exposed=True),
        state.gather_forward_seconds + state.gather_backward_seconds,
        state.reduce_seconds,
        run.memory.internal,
        run.plan.zero,
        state.gather_bytes,
        state.reduce_bytes,
    )
