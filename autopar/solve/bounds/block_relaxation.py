"""The part of every block that bounds on memory look at: the tensors that a backward may need, each at its smallest placement (or
saved in parts), and what may be recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from autopar.cost_models.step.recompute import recomputable_nodes
from autopar.ir.graph import Block, Graph, Node
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.partition_saved import replicated_on
from autopar.ir.placement import Placements
from autopar.operations.table import operation
from autopar.solve.ilp.linear_model import INFINITY, LinearModel
from autopar.solve.problem.problem import BlockTable, Problem

_Slot = tuple[str, int]
"""An input of a block."""


@dataclass(frozen=True, slots=True)
class RelaxedTensor:
    """A storage that a backward may need. `bytes`: of one micro-batch at the smallest placement, or of a part of it that one rank
    may save. `copies`: distinct ones in a micro-batch. `producer`: the operation that produces it (empty: none). `needed`: some
    backward needs it under every strategy. `in_flight`: micro-batches that hold it at once."""

    bytes: float
    copies: float
    producer: str
    needed: bool


@dataclass(frozen=True, slots=True)
class BlockRelaxation:
    """The relaxation of one distinct block. `recompute`: the operations that may be recomputed, with their least seconds and the
    tensors that they read. `offload_seconds_per_byte`: to the host and back; None without a host. `shared`: tensors that calls of
    more than one block or several calls read: nobody knows which of them holds it."""

    name: str
    calls: float
    tensors: Mapping[str, RelaxedTensor]
    recompute: Mapping[str, tuple[float, tuple[str, ...]]]
    offload_seconds_per_byte: float | None
    shared: frozenset[str] = frozenset()


def relax_blocks(problem: Problem) -> tuple[BlockRelaxation, ...]:
    """All blocks, at the batch of the tables."""
    first, several = _first_readers(problem.graph)
    return tuple(_relax_block(problem, name, table, first, several) for name, table in problem.blocks.items())


def _first_readers(graph: Graph) -> tuple[dict[_Slot, int], set[_Slot]]:
    """Return the number of tensors between calls that each input of a block is the first to read (such a tensor is saved once),
    and the inputs that read some tensor which others read too."""
    readers: dict[str, list[_Slot]] = {}
    for call in graph.calls:
        for index, name in enumerate(call.inputs):
            readers.setdefault(name, []).append((call.block, index))
    several = {slot for each in readers.values() if len(each) > 1 for slot in each}
    return dict(Counter(each[0] for each in readers.values())), several


def _relax_block(
    problem: Problem, name: str, table: BlockTable, first: Mapping[_Slot, int], several: Collection[_Slot]
) -> BlockRelaxation:
    block, costs, calls = table.block, table.costs, problem.graph.count(name)
    storage, producers = value_storages(block), _producers(block)

    def find(value: str) -> str:
        return storage.get(value, value)

    parameters = {parameter.value.name for parameter in block.parameters}
    needed, extras = _least_saved(table, find)
    ends = {find(output) for output in block.outputs}
    inputs = {value.name: index for index, value in enumerate(block.inputs)}
    tensors: dict[str, RelaxedTensor] = {}
    for value in dict.fromkeys([*map(find, costs.values), *needed]):
        if value in parameters:
            continue
        if value in extras:
            tensors[value] = RelaxedTensor(extras[value], calls, value.removesuffix("+"), value in needed)
            continue
        copies = first.get((name, inputs[value]), 0) if value in inputs else 0 if value in ends else calls
        states = list(table.conversions[value].states) if value in table.conversions else []
        states += _produced_placements(table, producers.get(value, ""), value)
        least = min((costs.value_bytes(value, at) / _most_parts(problem.mesh, at) for at in states), default=0.0)
        tensors[value] = RelaxedTensor(least, copies, producers.get(value, ""), value in needed)
    recompute: dict[str, tuple[float, tuple[str, ...]]] = {}
    recomputable = recomputable_nodes(block)
    for node in block.nodes:
        if node.name in recomputable and not _is_view(node):
            reads = tuple(dict.fromkeys(find(value) for value in node.operands() if find(value) in tensors))
            recompute[node.name] = min(each.seconds.recompute.backward for each in table.strategies[node.name]), reads
    offload = sum(costs.offload_seconds(1.0)) if problem.cluster.host is not None else None
    shared = frozenset(value for value, index in inputs.items() if (name, index) in several)
    return BlockRelaxation(name, calls, tensors, recompute, offload, shared)


def add_block(model: LinearModel, block: BlockRelaxation, offloads: bool = False) -> tuple[dict[str, int], ...]:
    """Add S, O (where calls may offload), A and r of one block, with the rows that bind them; return S and O by tensor, and r by
    operation."""
    r = {name: model.variable(1.0) for name in block.recompute}
    saved, offloaded, available = dict[str, int](), dict[str, int](), dict[str, int]()
    for name, tensor in block.tensors.items():
        saved[name] = model.variable(1.0)
        support = {saved[name]: 1.0}
        if offloads and block.offload_seconds_per_byte is not None and tensor.bytes:
            offloaded[name] = model.variable(1.0)
            support[offloaded[name]] = 1.0
        if tensor.producer in r:
            support[r[tensor.producer]] = 1.0
        # A <= S + O + r of what produces it
        available[name] = a = model.variable(1.0, lower=float(tensor.needed))
        model.row({**support, a: -1.0}, 0.0, INFINITY)
    for name, (_, reads) in block.recompute.items():
        for value in reads:
            # r <= A of what it reads
            model.row([(available[value], 1.0), (r[name], -1.0)], 0.0, INFINITY)
    return saved, offloaded, r


def _most_parts(mesh: Mesh, placements: Placements) -> int:
    """Return the largest number of parts that a tensor may be saved in: over a model axis that it is replicated on."""
    model = (axis for axis, name in enumerate(mesh.names) if name != DATA_AXIS and replicated_on(placements, axis))
    return max((mesh.sizes[axis] for axis in model), default=1)


def _is_view(node: Node) -> bool:
    return operation(node.op).view and bool(node.operands())


def value_storages(block: Block) -> dict[str, str]:
    """Results of operations -> the value whose storage they have."""
    storage: dict[str, str] = {}
    for node in block.nodes:
        base = node.operands()[0] if _is_view(node) else ""
        for output in node.outputs:
            storage[output.name] = storage.get(base, base) if base else output.name
    return storage


def _producers(block: Block) -> dict[str, str]:
    """Values that have a storage of their own -> the operation that produces them."""
    return {output.name: node.name for node in block.nodes if not _is_view(node) for output in node.outputs}


def _least_saved(table: BlockTable, find: Callable[[str], str]) -> tuple[dict[str, None], dict[str, float]]:
    """Return the tensors that some operation saves whatever its strategy, and the least bytes of what is saved beside operands
    and results."""
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
