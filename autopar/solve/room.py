"""A bound that knows memory: what is kept, made again or moved to the host, and how state is sharded, without placements.

Every tensor is taken at its smallest placement, every operation that runs again at its fastest strategy, conversions that run
again are free, and memory is looked at once, when the last forward has ended: all calls keep what their backward needs, and the
state is there. So the linear program is below every plan of the point; it has some hundred variables, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from autopar.cost_models.flops import VIEWS, packet
from autopar.cost_models.state import Group, optimizer_named
from autopar.cost_models.traffic import Traffic
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placements
from autopar.solve import ilp
from autopar.solve.linear import INFINITY, LinearModel, add, total
from autopar.solve.problem import BlockTable, Problem
from autopar.solve.replay import replayable


@dataclass(frozen=True, slots=True)
class Tensor:
    """What a backward may need. `bytes` of one micro-batch at the smallest placement, `copies` in a micro-batch; `maker` is the
    operation that makes it (empty: nothing does), `needed` whether some backward needs it under every strategy."""

    bytes: float
    copies: int
    maker: str
    needed: bool


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """One distinct block. `again` are operations that may run again: seconds at least, and the tensors that they read."""

    calls: int
    tensors: Mapping[str, Tensor]
    again: Mapping[str, tuple[float, tuple[str, ...]]]
    away_and_back_seconds: float | None


def needs(problem: Problem) -> tuple[BlockNeeds, ...]:
    """Of all blocks, at the batch of the tables."""
    first = _first_readers(problem.graph)
    return tuple(_block_needs(problem, name, table, first) for name, table in problem.blocks.items())


def _first_readers(graph: Graph) -> dict[tuple[str, int], int]:
    """How many tensors between calls each input of a block is the first to read: such a tensor is kept once."""
    seen: set[str] = set()
    out: dict[tuple[str, int], int] = {}
    for call in graph.calls:
        for index, name in enumerate(call.inputs):
            out[call.block, index] = out.get((call.block, index), 0) + (name not in seen)
            seen.add(name)
    return out


def _block_needs(problem: Problem, name: str, table: BlockTable, first: Mapping[tuple[str, int], int]) -> BlockNeeds:
    block, costs, calls = table.block, table.costs, problem.graph.count(name)
    root: dict[str, str] = {}

    def find(value: str) -> str:
        return root.get(value, value)

    makers: dict[str, str] = {}
    for node in block.nodes:
        view = packet(node.op) in VIEWS and node.operands()
        for output in node.outputs:
            root[output.name] = find(node.operands()[0]) if view else output.name
            if not view:
                makers[output.name] = node.name
    parameters = {parameter.value.name for parameter in block.parameters}
    wanted, extras = _wanted(table, find)
    ends = {find(output) for output in block.outputs}
    inputs = {value.name: index for index, value in enumerate(block.inputs)}
    tensors: dict[str, Tensor] = {}
    for value in dict.fromkeys([*map(find, costs.values), *wanted]):
        if value in parameters:
            continue
        if value in extras:
            tensors[value] = Tensor(extras[value], calls, value.removesuffix("+"), value in wanted)
            continue
        copies = first[name, inputs[value]] if value in inputs else 0 if value in ends else calls
        states = [*(table.moves[value].states if value in table.moves else ()), *_placed(table, makers.get(value, ""), value)]
        least = min((costs.value_bytes(value, at) for at in states), default=0.0)
        tensors[value] = Tensor(least, copies, makers.get(value, ""), value in wanted)
    again: dict[str, tuple[float, tuple[str, ...]]] = {}
    ready = replayable(block)
    for node in block.nodes:
        if node.name in ready and not (packet(node.op) in VIEWS and node.operands()):
            reads = tuple(dict.fromkeys(find(value) for value in node.operands() if find(value) in tensors))
            again[node.name] = min(choice.seconds.forward for choice in table.choices[node.name]), reads
    host = sum(costs.offload_seconds(1.0)) if problem.cluster.host is not None else None
    return BlockNeeds(calls, tensors, again, host)


def _wanted(table: BlockTable, find: Callable[[str], str]) -> tuple[set[str], dict[str, float]]:
    """Tensors that some operation keeps whatever its strategy; and the least bytes of what is kept beside them."""
    wanted: set[str] = set()
    extras: dict[str, float] = {}
    for choices in table.choices.values():
        every: set[str] | None = None
        for choice in choices:
            kept = {}
            for each in table.costs.kept(choice.plan):
                kept[each.value if each.value.endswith("+") else find(each.value)] = each.bytes
            every = set(kept) if every is None else every & set(kept)
            for value, size in kept.items():
                if value.endswith("+"):
                    extras[value] = min(extras.get(value, size), size)
        wanted |= every or set()
    return wanted, extras


def _placed(table: BlockTable, node: str, value: str) -> list[Placements]:
    if not node:
        return []
    outputs = [output.name for output in table.costs.nodes[node].outputs]
    return [choice.plan.results[outputs.index(value)] for choice in table.choices[node]]


def room_bound(
    problem: Problem, of: tuple[BlockNeeds, ...], micro_batches: int, flow: Mapping[float, float], stages: int = 1
) -> float:
    """Seconds below every plan of `problem`'s mesh and state group in `micro_batches` (a multiple of the tables'). `flow` are
    bounds of `Flow` by their weight, at least for weight 1. Infinite where nothing fits.

    Of a pipeline of `stages`, below every cut and schedule of it: the stage that works longest works at least as long as they
    do on average, all stages together have so many times the memory, and each holds one micro-batch at least. `flow` is of one
    stage then.

    ``minimise t + optimizer``, where ``t >= main + what runs again`` and ``t >= traffic of the state + shared``, so for every
    weight ``t >= flow[weight] + weight x what runs again + (1 - weight) x traffic``.
    """
    room = problem.cluster.device.room_bytes * stages
    if room <= 0:
        return INFINITY
    flow = {weight: seconds * stages for weight, seconds in flow.items()}
    flow_seconds = flow[1.0]
    model = LinearModel()
    time = model.variable()
    model.cost[time] = 1.0
    unit = max(flow_seconds, 1e-9)
    again: dict[int, float] = {}
    memory: dict[int, float] = {}
    moved = _state(problem, model, micro_batches, unit, memory, room)
    # t >= traffic of the state
    model.at_least(time, moved)
    for each in of:
        _keeping(each, model, problem.micro_batches, problem.micro_batches / micro_batches / room, unit, again, memory, time)
    for weight, seconds in flow.items():
        # t >= flow[weight] + weight x sum r * seconds + (1 - weight) x traffic
        model.at_least(time, total((weight, again), (1 - weight, moved)), seconds / unit)
    # state + sum S * bytes <= room
    model.row(memory, -INFINITY, 1.0)
    outcome = ilp.solve(model, relaxed=True)
    if outcome.status is ilp.Status.INFEASIBLE:
        return INFINITY
    return (max(flow_seconds, outcome.objective * unit) if outcome.status is ilp.Status.OPTIMAL else flow_seconds) / stages


def _state(
    problem: Problem, model: LinearModel, micro_batches: int, unit: float, memory: dict[int, float], room_bytes: float
) -> dict[int, float]:
    """Every parameter cut over all model axes, each call's state sharded as is best. Returns the traffic behind the calls."""
    device = problem.cluster.device
    cut = problem.mesh.size // problem.mesh.size_of(DATA_AXIS)
    rule = optimizer_named(problem.optimizer)
    traffic: dict[int, float] = {}
    for kind, count in problem.boundary.kind_counts.items():
        table = problem.blocks[kind.block]
        own = [p for p, alone in zip(table.block.parameters, kind.own, strict=True) if alone and not p.buffer and p.cut == 1]
        sizes = [prod(size for size in p.value.shape if isinstance(size, int)) for p in own]
        trained = sum(size for p, size in zip(own, sizes, strict=True) if p.trainable) / cut
        group = Group(sum(sizes) / cut, trained, len(own))
        chosen = {zero: model.variable(1.0) for zero in problem.zeros}
        model.row([(z, 1.0) for z in chosen.values()], 1.0, 1.0)
        for zero, z in chosen.items():
            cost = table.costs.group_state(group, zero, problem.precision, rule)
            shards = table.costs.state_links[0].size
            moved = Traffic.of(cost, zero, shards, device, problem.precision, micro_batches)
            traffic[z] = count * moved.data_axis_seconds(micro_batches) / unit
            model.cost[z] = count * moved.optimizer_seconds / unit
            held = cost.memory.parameters + cost.memory.optimizer
            held += 0.0 if cost.memory.gathered_is_transient else cost.memory.gathered
            held += cost.memory.accumulated if micro_batches > 1 else 0.0
            memory[z] = count * held / room_bytes
    return traffic


def _keeping(
    of: BlockNeeds, model: LinearModel, repeats: int, byte: float, unit: float, again: dict[int, float], memory: dict[int, float],
    time: int,
) -> None:  # fmt: skip
    replays = {name: model.variable(1.0) for name in of.again}
    available: dict[str, int] = {}
    hosted: dict[int, float] = {}
    for name, tensor in of.tensors.items():
        kept = model.variable(1.0)
        add(memory, {kept: tensor.copies * tensor.bytes * byte})
        support = {kept: 1.0}
        if of.away_and_back_seconds is not None and tensor.bytes:
            away = model.variable(1.0)
            support[away] = 1.0
            hosted[away] = of.calls * repeats * tensor.bytes * of.away_and_back_seconds / unit
        if tensor.maker in replays:
            support[replays[tensor.maker]] = 1.0
        # A <= S + O + r of what makes it
        available[name] = a = model.variable(1.0, lower=float(tensor.needed))
        model.row({**support, a: -1.0}, 0.0, INFINITY)
    for name, (seconds, reads) in of.again.items():
        add(again, {replays[name]: of.calls * repeats * seconds / unit})
        for value in reads:
            # r <= A of what it reads
            model.row([(available[value], 1.0), (replays[name], -1.0)], 0.0, INFINITY)
    # t >= transfers to the host and back
    model.at_least(time, hosted)
