"""A lower bound with memory: what is saved, recomputed and offloaded, and how state is sharded, without placements.

Every tensor is taken at its smallest placement, every recomputed operation at its fastest strategy, recomputed conversions are
free, and memory is looked at once, when the last forward has ended: all calls have saved what their backward needs, and the state
is there. So the linear program is below every plan of the point; it has some hundred variables, whatever the mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.hardware.allocator import communicator_count, fragmentation, tensor_budget_bytes
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_communication import StateCommunication
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.tensors.flops import VIEWS, packet
from autopar.ir.graph import Block, Graph, Node, Parameter
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.placement import Placements
from autopar.solve.ilp.linear_model import INFINITY, LinearModel, Terms, add, total
from autopar.solve.ilp.solver import Status, solve
from autopar.solve.ilp.storages import recomputable_nodes
from autopar.solve.problem.problem import BlockTable, Problem


@dataclass(frozen=True, slots=True)
class RelaxedTensor:
    """A storage that a backward may need. `bytes`: of one micro-batch at the smallest placement. `copies`: distinct ones in a
    micro-batch. `producer`: the operation that produces it (empty: none). `needed`: some backward needs it under every
    strategy."""

    bytes: float
    copies: int
    producer: str
    needed: bool


@dataclass(frozen=True, slots=True)
class BlockRelaxation:
    """One distinct block. `recompute`: the operations that may be recomputed, with their least seconds and the tensors that they
    read. `offload_seconds_per_byte`: to the host and back; None without a host."""

    calls: int
    tensors: Mapping[str, RelaxedTensor]
    recompute: Mapping[str, tuple[float, tuple[str, ...]]]
    offload_seconds_per_byte: float | None


def relax_blocks(problem: Problem) -> tuple[BlockRelaxation, ...]:
    """All blocks, at the batch of the tables."""
    first = _first_readers(problem.graph)
    return tuple(_relax_block(problem, name, table, first) for name, table in problem.blocks.items())


def _first_readers(graph: Graph) -> dict[tuple[str, int], int]:
    """How many tensors between calls each input of a block is the first to read: such a tensor is saved once."""
    seen: set[str] = set()
    out: dict[tuple[str, int], int] = {}
    for call in graph.calls:
        for index, name in enumerate(call.inputs):
            out[call.block, index] = out.get((call.block, index), 0) + (name not in seen)
            seen.add(name)
    return out


def _relax_block(problem: Problem, name: str, table: BlockTable, first: Mapping[tuple[str, int], int]) -> BlockRelaxation:
    block, costs, calls = table.block, table.costs, problem.graph.count(name)
    storage, producers = _storages(block)

    def find(value: str) -> str:
        return storage.get(value, value)

    parameters = {parameter.value.name for parameter in block.parameters}
    needed, extras = _needed(table, find)
    ends = {find(output) for output in block.outputs}
    inputs = {value.name: index for index, value in enumerate(block.inputs)}
    tensors: dict[str, RelaxedTensor] = {}
    for value in dict.fromkeys([*map(find, costs.values), *needed]):
        if value in parameters:
            continue
        if value in extras:
            tensors[value] = RelaxedTensor(extras[value], calls, value.removesuffix("+"), value in needed)
            continue
        copies = first[name, inputs[value]] if value in inputs else 0 if value in ends else calls
        states = list(table.conversions[value].states) if value in table.conversions else []
        states += _produced_placements(table, producers.get(value, ""), value)
        least = min((costs.value_bytes(value, at) for at in states), default=0.0)
        tensors[value] = RelaxedTensor(least, copies, producers.get(value, ""), value in needed)
    recompute: dict[str, tuple[float, tuple[str, ...]]] = {}
    recomputable = recomputable_nodes(block)
    for node in block.nodes:
        if node.name in recomputable and not _is_view(node):
            reads = tuple(dict.fromkeys(find(value) for value in node.operands() if find(value) in tensors))
            recompute[node.name] = min(each.seconds.forward for each in table.strategies[node.name]), reads
    offload = sum(costs.offload_seconds(1.0)) if problem.cluster.host is not None else None
    return BlockRelaxation(calls, tensors, recompute, offload)


def _is_view(node: Node) -> bool:
    return packet(node.op) in VIEWS and bool(node.operands())


def _storages(block: Block) -> tuple[dict[str, str], dict[str, str]]:
    """Results of operations -> the value whose storage they have; and such values -> the operation that produces them."""
    storage: dict[str, str] = {}
    producers: dict[str, str] = {}
    for node in block.nodes:
        for output in node.outputs:
            if _is_view(node):
                base = node.operands()[0]
                storage[output.name] = storage.get(base, base)
            else:
                storage[output.name] = output.name
                producers[output.name] = node.name
    return storage, producers


def _needed(table: BlockTable, find: Callable[[str], str]) -> tuple[dict[str, None], dict[str, float]]:
    """Tensors that some operation saves whatever its strategy; and the least bytes of what is saved beside operands and
    results."""
    needed: dict[str, None] = {}
    extras: dict[str, float] = {}
    for strategies in table.strategies.values():
        always: list[str] | None = None
        for strategy in strategies:
            saved = {}
            for each in table.costs.saved_tensors(strategy.plan):
                saved[each.value if each.value.endswith("+") else find(each.value)] = each.bytes
            always = [value for value in saved if always is None or value in always]
            for value, size in saved.items():
                if value.endswith("+"):
                    extras[value] = min(extras.get(value, size), size)
        needed |= dict.fromkeys(always or ())
    return needed, extras


def _produced_placements(table: BlockTable, node: str, value: str) -> list[Placements]:
    if not node:
        return []
    outputs = [output.name for output in table.costs.nodes[node].outputs]
    return [strategy.plan.results[outputs.index(value)] for strategy in table.strategies[node]]


def memory_bound(
    problem: Problem, blocks: Sequence[BlockRelaxation], micro_batches: int, flow: Mapping[float, float], stages: int = 1
) -> float:
    """Seconds below every plan of `problem`'s mesh and state group in `micro_batches` (a multiple of the tables'). `flow`: bounds
    of `FlowRelaxation` by their weight, at least for weight 1. Infinite where nothing fits.

    Of a pipeline of `stages`, below every partition and schedule of it: the bottleneck stage takes at least as long as the stages
    do on average, all stages together have so many times the memory, and each has at least one micro-batch in flight. `flow` is
    of one pipeline stage then.

    ``minimise t + optimizer``, where ``t >= main + recomputation + contention x overlappable`` (what overlaps compute slows it by
    its share, and what does not adds all of itself) and ``t >= state communication + shared``, so for every weight
    ``t >= flow[weight] + weight x (recomputation + contention x overlappable) + (1 - weight) x state communication``.
    Overlappable are the transfers of `micro_batch_clock`: neither the last call gathers between a forward and its backward, nor
    the first one between a backward and the next forward.
    """
    device = problem.cluster.device
    budget_bytes = tensor_budget_bytes(device, communicator_count(problem.mesh, problem.zero_group, stages)) * stages
    if budget_bytes <= 0:
        return INFINITY
    flow = {weight: seconds * stages for weight, seconds in flow.items()}
    flow_seconds = flow[1.0]
    relaxation = _MemoryRelaxation(problem, micro_batches, budget_bytes, unit=max(flow_seconds, 1e-9))
    relaxation.add_states()
    for each in blocks:
        relaxation.add_block(each)
    relaxation.add_flow_bounds(flow)
    relaxation.add_memory()
    outcome = solve(relaxation.model, relaxed=True)
    if outcome.status is Status.INFEASIBLE:
        return INFINITY
    seconds = max(flow_seconds, outcome.objective * relaxation.unit) if outcome.status is Status.OPTIMAL else flow_seconds
    return seconds / stages


class _MemoryRelaxation:
    """The linear program. Seconds are in `unit`, bytes in `budget_bytes`; `t` is the column of the step without the optimizer."""

    def __init__(self, problem: Problem, micro_batches: int, budget_bytes: float, unit: float) -> None:
        self.problem, self.micro_batches, self.budget_bytes, self.unit = problem, micro_batches, budget_bytes, unit
        self.held = 1 + fragmentation(problem.cluster.device)
        self.model = LinearModel()
        self.t = self.model.variable()
        self.model.cost[self.t] = 1.0
        self.recompute: dict[int, float] = {}
        self.communication: dict[int, float] = {}
        self.overlappable: dict[int, float] = {}
        self.memory: dict[int, float] = {}

    def add_states(self) -> None:
        """Every parameter is sharded over all model axes, and the state of each kind of call over the data axis as is best."""
        for kind, count in self.problem.boundary.kind_counts.items():
            table = self.problem.blocks[kind.block]
            own = [
                parameter
                for parameter, alone in zip(table.block.parameters, kind.own, strict=True)
                if alone and not parameter.buffer and parameter.expert_parallel == 1
            ]
            kinds = self.problem.boundary.call_kinds
            self._add_state(table, own, count, is_first=kind == kinds[0], is_last=kind == kinds[-1])
        # t >= state communication
        self.model.at_least(self.t, self.communication)

    def _add_state(self, table: BlockTable, parameters: Sequence[Parameter], count: int, is_first: bool, is_last: bool) -> None:
        problem, model = self.problem, self.model
        cut = problem.mesh.size // problem.mesh.size_of(DATA_AXIS)
        sizes = [prod(size for size in each.value.shape if isinstance(size, int)) for each in parameters]
        trained = sum(size for each, size in zip(parameters, sizes, strict=True) if each.trainable) / cut
        group = StateGroup(sum(sizes) / cut, trained, len(parameters))
        chosen = {zero: model.variable(1.0) for zero in problem.zeros}
        # sum_zero z = 1
        model.row([(z, 1.0) for z in chosen.values()], 1.0, 1.0)
        for zero, z in chosen.items():
            cost = table.costs.group_state_cost(group, zero, problem.precision, optimizer_named(problem.optimizer))
            shards = table.costs.state_links[0].size
            device = problem.cluster.device
            communication = StateCommunication.of(cost, zero, shards, device, problem.precision, self.micro_batches)
            sent = count * communication.data_axis_seconds(self.micro_batches)
            kept = self.micro_batches * communication.gather_backward * is_last
            kept += (self.micro_batches - 1) * communication.gather_each * is_first
            self.communication[z] = sent / self.unit
            self.overlappable[z] = (sent - kept) / self.unit
            model.cost[z] = count * communication.optimizer_seconds / self.unit
            state_bytes = cost.memory.parameters + cost.memory.optimizer
            state_bytes += 0.0 if cost.memory.gathered_is_transient else self.held * cost.memory.gathered
            state_bytes += self.held * cost.memory.accumulated if self.micro_batches > 1 else 0.0
            self.memory[z] = count * state_bytes / self.budget_bytes

    def add_block(self, block: BlockRelaxation) -> None:
        """S, O, A and r of one block. The tables' micro-batches are `repeats` in a step; memory is that of the smaller ones."""
        model, repeats = self.model, self.problem.micro_batches
        byte = self.held * repeats / self.micro_batches / self.budget_bytes
        r = {name: model.variable(1.0) for name in block.recompute}
        available: dict[str, int] = {}
        offload: dict[int, float] = {}
        for name, tensor in block.tensors.items():
            saved = model.variable(1.0)
            add(self.memory, {saved: tensor.copies * tensor.bytes * byte})
            support = {saved: 1.0}
            if block.offload_seconds_per_byte is not None and tensor.bytes:
                offloaded = model.variable(1.0)
                support[offloaded] = 1.0
                offload[offloaded] = block.calls * repeats * tensor.bytes * block.offload_seconds_per_byte / self.unit
            if tensor.producer in r:
                support[r[tensor.producer]] = 1.0
            # A <= S + O + r of what produces it; A = 1 where it is needed
            available[name] = a = model.variable(1.0, lower=float(tensor.needed))
            model.row({**support, a: -1.0}, 0.0, INFINITY)
        for name, (seconds, reads) in block.recompute.items():
            add(self.recompute, {r[name]: block.calls * repeats * seconds / self.unit})
            for value in reads:
                # r <= A of what it reads
                model.row([(available[value], 1.0), (r[name], -1.0)], 0.0, INFINITY)
        # t >= copies to the host and back
        model.at_least(self.t, offload)

    def add_flow_bounds(self, flow: Mapping[float, float]) -> None:
        """The seconds of the calls, by weight of their main stream."""
        for weight, seconds in flow.items():
            # t >= flow[weight] + weight x (sum r * seconds + contention x overlappable) + (1 - weight) x state communication
            slowed = weight * self.problem.cluster.overlap.contention
            terms: Terms = total((weight, self.recompute), (slowed, self.overlappable), (1 - weight, self.communication))
            self.model.at_least(self.t, terms, seconds / self.unit)

    def add_memory(self) -> None:
        """The memory budget."""
        # state + (1 + fragmentation) * sum S * bytes <= budget
        self.model.row(self.memory, -INFINITY, 1.0)
