"""Prices a candidate by simulating its program call by call: the word that every plan is judged by, also the solver's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster, check_mesh
from autopar.cost_models.memory import CallMemory, call_kept, peak_memory
from autopar.cost_models.simulate import Steps, simulate
from autopar.cost_models.state import Optimizer, StateCost, optimizer_named
from autopar.cost_models.trace import Run
from autopar.ir.graph import Graph, Parameter
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placements
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


@dataclass(frozen=True, slots=True)
class CallTime:
    """One call on the simulated clock. `*_waited_seconds` is what it stood still for gathers and reductions on the data axis."""

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
    """What a candidate costs. Compute, exposed, waited and optimizer seconds add up to the step. `axis_seconds` is the time that
    each axis communicates (hidden or not), `redundant_share` the share of FLOPs that every rank of an axis repeats,
    `model_flops` those of one step over all devices (no recomputation, causal attention counted by half)."""

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

    @property
    def fits(self) -> bool:
        return self.peak_memory_bytes <= self.memory_capacity_bytes


def evaluate(
    graph: Graph, candidate: Candidate, cluster: Cluster, optimizer: str = "adamw", costs: Mapping[str, BlockCosts] | None = None
) -> Evaluation:
    """Simulates one training step of `candidate`. ClusterError where the mesh is not the cluster's size.

    `costs` are the blocks' price tables by name, where the caller has them for this graph, mesh, batch and cluster already.
    """
    check_mesh(cluster, candidate.mesh)
    rule = optimizer_named(optimizer)
    runs = {
        block.name: Run.of(
            (costs or {}).get(block.name) or BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster),
            candidate.block(block.name),
        )
        for block in graph.blocks
    }
    states, root = _states(graph, candidate, runs, rule)
    steps = simulate(graph, candidate, cluster, runs, states, root)
    return _summary(graph, candidate, cluster, runs, states, root, steps, _memory(graph, cluster, runs, states, root))


def _states(
    graph: Graph, candidate: Candidate, runs: Mapping[str, Run], optimizer: Optimizer
) -> tuple[list[StateCost], StateCost]:
    """The state of each call's own parameters, and of those that several calls share: these form one group at the root, which is
    gathered before the first call, not resharded, and reduced after the last."""
    users = Counter(name for call in graph.calls for name in set(call.parameters))
    shared: dict[str, tuple[Parameter, Placements]] = {}
    shared_zero = 0
    memo: dict[tuple[str, tuple[bool, ...]], StateCost] = {}
    states = []
    for call in graph.calls:
        run = runs[call.block]
        own = tuple(users[name] == 1 for name in call.parameters)
        stored = list(zip(run.costs.block.parameters, run.plan.parameters, strict=True))
        if not all(own):
            shared.update((name, pair) for name, pair in zip(call.parameters, stored, strict=True) if users[name] > 1)
            shared_zero = max(shared_zero, min(2, run.plan.zero))
        key = call.block, own
        if key not in memo:
            mine = [pair for pair, alone in zip(stored, own, strict=True) if alone]
            memo[key] = run.costs.state(mine, run.plan.zero, candidate.precision, optimizer)
        states.append(memo[key])
    any_run = next(iter(runs.values()))
    return states, any_run.costs.state(shared.values(), shared_zero, candidate.precision, optimizer)


def _memory(
    graph: Graph, cluster: Cluster, runs: Mapping[str, Run], states: Sequence[StateCost], root: StateCost
) -> dict[str, int]:
    kept = call_kept(graph, {name: run.memory for name, run in runs.items()})
    calls = [
        CallMemory(bytes_kept, runs[call.block].memory.working, state.memory)
        for call, bytes_kept, state in zip(graph.calls, kept, states, strict=True)
    ]
    device = cluster.device
    return {kind: round(size) for kind, size in peak_memory(calls, root.memory, device.base_bytes, device.kind != "cpu").items()}


def _summary(
    graph: Graph,
    candidate: Candidate,
    cluster: Cluster,
    runs: Mapping[str, Run],
    states: Sequence[StateCost],
    root: StateCost,
    steps: Steps,
    memory: Mapping[str, int],
) -> Evaluation:
    counts = Counter(call.block for call in graph.calls)
    mesh, device = candidate.mesh, cluster.device

    def total(of: Callable[[Run], float]) -> float:
        return sum(count * of(runs[name]) for name, count in counts.items())

    def time(run: Run, exposed: bool) -> float:
        return run.total(backward=False, exposed=exposed) + run.total(backward=True, exposed=exposed)

    flops, model_flops = total(lambda run: run.flops), total(lambda run: run.model_flops)
    axes = [total(lambda run, axis=axis: run.axis_seconds[axis]) for axis in range(len(mesh.sizes))]  # type: ignore[misc]
    axes[mesh.index(DATA_AXIS)] += sum(
        state.gather_forward_seconds + state.gather_backward_seconds + state.reduce_seconds for state in (*states, root)
    )
    redundant = [total(lambda run, axis=axis: run.redundant_flops[axis]) for axis in range(len(mesh.sizes))]  # type: ignore[misc]
    step = steps.forward_seconds + steps.backward_seconds + steps.optimizer_seconds
    per_device = model_flops / step / mesh.size if step else 0.0
    first = {call.block: index for index, call in reversed(list(enumerate(graph.calls)))}
    return Evaluation(
        step,
        steps.forward_seconds,
        steps.backward_seconds,
        steps.optimizer_seconds,
        total(lambda run: time(run, False)),
        total(lambda run: time(run, True)),
        steps.waited_seconds,
        tuple(zip(mesh.names, axes, strict=True)),
        tuple((name, share / flops if flops else 0.0) for name, share in zip(mesh.names, redundant, strict=True)),
        model_flops,
        per_device / 1e12,
        per_device / device.peak_flops_per_second(candidate.precision.compute),
        sum(memory.values()),
        tuple(memory.items()),
        device.memory_bytes,
        tuple(
            _block_time(runs[block.name], counts[block.name], states[first[block.name]])
            for block in graph.blocks
            if block.name in first
        ),
        tuple(
            CallTime(call.block, call.prefix, *forward, *backward)
            for call, forward, backward in zip(graph.calls, steps.forward, steps.backward, strict=True)
        ),
    )


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
    )
