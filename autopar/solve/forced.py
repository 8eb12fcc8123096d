"""A candidate of a given configuration: degrees, state sharding, recomputation and pipeline are told, not searched.

Placements come from the planner's own tables and ILP with everything pinned that the configuration says: matrices are cut on the
tensor axis (that is what tensor parallelism means), between layers values are whole (`I`) or cut along the sequence
(``S(1)``, sequence parallelism), lookups and the head are cut by vocabulary (arXiv 1909.08053, section 3; 2205.05198, 4.2).
What is left open is decided on a *reference* cluster (bandwidth only, one example per data rank). So placements are a function of
the graph's blocks and the degrees of the model axes alone, and not of micro-batch, depth, data degree, devices or links.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.cost_models.flops import ATTENTION, EXPERTS, packet
from autopar.cost_models.hardware import Cluster, Device, Link
from autopar.errors import BatchError, ClusterError, Infeasible, PlanError
from autopar.ir.graph import Block, Graph, Node
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Shard
from autopar.ir.plan import BlockPlan, Candidate, Pipeline, Precision
from autopar.ir.stages import repeatable
from autopar.rules.registry import Registry, default_registry
from autopar.solve import ilp
from autopar.solve.decode import decode
from autopar.solve.formulate import formulate
from autopar.solve.problem import BlockTable, Choice, Problem, build

TENSOR_AXIS = "tp"
RECOMPUTE = ("none", "selective", "products", "full", "everything")


@dataclass(frozen=True, slots=True)
class Forced:
    """A complete configuration. The data degree is what the cluster leaves. `zero_group`: state is sharded over so many
    neighbours (0: all data ranks). `sliced_experts`: the tensor axis cuts inside experts too, else it takes part in dealing
    them out. `recompute` is ``none``, ``selective`` (the attention's core), ``products`` (all but attention and every
    second product of a layer), ``full`` (layers, what the backward needs: torch's checkpoint) or ``everything`` (layers from
    end to end: checkpoints that run all of it again). It is for `recomputed_blocks`, or for all that are called more than once.
    `layers` are those of each pipeline chunk, where they are not dealt evenly.
    """

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual: int = 1
    zero: int = 0
    zero_group: int = 0
    sliced_experts: bool = True
    micro_batches: int = 1
    recompute: str = "none"
    recomputed_blocks: tuple[str, ...] = ()
    schedule: str = "1f1b"
    layers: tuple[int, ...] = ()
    weight_versions: int = 1
    precision: Precision = Precision()
    optimizer: str = "adamw"


Placed = tuple[BlockPlan, ...]
"""The blocks' placements on (data, model axes), without state sharding and recomputation."""


def forced(
    graph: Graph, cluster: Cluster, wanted: Forced, placed: Placed | None = None, registry: Registry | None = None
) -> Candidate:
    """The candidate. `placed` is `place` of this graph's blocks and degrees, where the caller has it.

    ClusterError where degrees do not multiply to the cluster, BatchError where the batch gives no example to a data rank or
    micro-batch, Infeasible where an operation cannot be placed so.
    """
    mesh = mesh_of(cluster, wanted)
    if wanted.recompute not in RECOMPUTE:
        raise PlanError(f"no recomputation {wanted.recompute!r}: write one of {', '.join(RECOMPUTE)}")
    if graph.batch < wanted.micro_batches:
        raise BatchError(f"a batch of {graph.batch} has no {wanted.micro_batches} micro-batches: force fewer")
    data = mesh.size_of(DATA_AXIS)
    placed = placed if placed is not None else place(graph, wanted, registry)
    repeated = set(wanted.recomputed_blocks) or {block.name for block in graph.blocks if graph.count(block.name) > 1}
    zero = wanted.zero if data > 1 else 0
    return Candidate(
        mesh,
        tuple(_recomputed(graph.block(plan.block), replace(plan, zero=zero), wanted, repeated) for plan in placed),
        graph.batch,
        wanted.precision,
        wanted.micro_batches,
        wanted.zero_group if wanted.zero_group < data else 0,
        Pipeline(
            wanted.pp,
            wanted.virtual,
            wanted.schedule,
            wanted.layers,
            repeated=repeated_values(graph, wanted.pp),
            weight_versions=wanted.weight_versions,
        ),
    )


def repeated_values(graph: Graph, stages: int) -> tuple[str, ...]:
    """What inputs determine (masks, rotary tables), which every stage makes for itself."""
    return tuple(repeatable(graph)) if stages > 1 else ()


def mesh_of(cluster: Cluster, wanted: Forced) -> Mesh:
    """The mesh of one pipeline stage. Ranks of one tensor group are neighbours."""
    model = wanted.tp * wanted.pp
    if cluster.size % model:
        raise ClusterError(
            f"tp={wanted.tp}, pp={wanted.pp} do not divide the {cluster.size} devices of {cluster.name}: force divisors"
        )
    axes = [Axis(DATA_AXIS, cluster.size // model)]
    if wanted.tp > 1:
        axes.append(Axis(TENSOR_AXIS, wanted.tp))
    return Mesh(tuple(axes))


def _recomputed(block: Block, plan: BlockPlan, wanted: Forced, repeated: set[str]) -> BlockPlan:
    if wanted.recompute == "none" or plan.block not in repeated:
        return plan
    if wanted.recompute == "full":
        return replace(plan, recompute=True)
    if wanted.recompute == "everything":
        return replace(plan, again=tuple(node.name for node in block.nodes), again_arcs=plan.arcs)
    if wanted.recompute == "products":
        return _keeping(block, plan, _half_of_products(block))
    return replace(plan, again=attention_core(block))


def _half_of_products(block: Block) -> set[str]:
    """What selective checkpointing per operation keeps: attention, and of the matrix products the first, third ... (torchtitan,
    ``_apply_op_sac_to_transformer_block``)."""
    products = [node.name for node in block.nodes if packet(node.op) in _PRODUCTS]
    return {*products[::2], *(node.name for node in block.nodes if packet(node.op) in ATTENTION)}


def _keeping(block: Block, plan: BlockPlan, kept: set[str]) -> BlockPlan:
    """Everything runs again but `kept` nodes and the reduction of sums."""
    again = tuple(node.name for node in block.nodes if node.name not in kept)
    arcs = tuple(arc for arc in plan.arcs if not any(isinstance(place, Partial) for place in arc.source))
    return replace(plan, again=again, again_arcs=arcs)


def attention_core(block: Block) -> tuple[str, ...]:
    """The nodes between query, key, value and the context: the selective recomputation of arXiv 2205.05198, section 5.

    Attention that is one operation; or, of scores, softmax and context, the nodes from a product of two computed
    tensors to the next one.
    """
    values = {value.name for value in (*block.inputs, *(p.value for p in block.parameters))}
    computed = [
        node for node in block.nodes if packet(node.op) in ("aten.matmul", "aten.bmm") and not values & set(node.operands())
    ]
    core = {node.name for node in block.nodes if packet(node.op) in ATTENTION}
    makers = {value.name: node for node in block.nodes for value in node.outputs}
    for scores, context in zip(computed[::2], computed[1::2], strict=False):
        core |= _between(scores, context, makers)
    return tuple(node.name for node in block.nodes if node.name in core)


def _between(first: Node, last: Node, makers: Mapping[str, Node]) -> set[str]:
    """Nodes on the way from `first` to `last`, both among them; none where there is no way."""

    def leads(node: Node) -> set[str]:
        if node.name == first.name:
            return {node.name}
        found: set[str] = set()
        for name in node.operands():
            if name in makers:
                found |= leads(makers[name])
        return found | {node.name} if found else set()

    return leads(last)


# -- placements


def place(graph: Graph, wanted: Forced, registry: Registry | None = None) -> Placed:
    """Placements of every block on (data, tp). A function of the blocks and of `wanted`'s model axes only."""
    axes = [Axis(DATA_AXIS, 2)] + ([Axis(TENSOR_AXIS, wanted.tp)] if wanted.tp > 1 else [])
    mesh = Mesh(tuple(axes))
    cluster = _reference(mesh)
    rules = registry or default_registry()
    problem = build(replace(graph, batch=2), mesh, cluster, wanted.precision, wanted.optimizer, rules, (0,))
    if wanted.tp > 1:
        problem = _pinned(problem, mesh.index(TENSOR_AXIS), wanted)
    made = formulate(problem)
    outcome = ilp.solve(made.model)
    if not outcome.values:
        raise Infeasible(
            f"{graph.name} cannot be placed with tp={wanted.tp}{', sequence parallel' if wanted.sequence_parallel else ''}: "
            "force another degree"
        )
    return decode(made, outcome.values).blocks


def _reference(mesh: Mesh) -> Cluster:
    """Bandwidths alone, in the proportions of a node of today; no latency, so that no size is special."""
    device = Device("reference", "cuda", (("float32", 1e14),), 2**62, 2e12, 0.0, 1.0, 1.0, 1.0, 0)
    return Cluster("reference", device, (Link("reference", mesh.size, 2e11, 0.0),), mesh.size)


def _pinned(problem: Problem, axis: int, wanted: Forced) -> Problem:
    """The tables without what the configuration forbids. What a table cannot do at all stays as it is (a replicated norm)."""
    between: Placement = Shard(1) if wanted.sequence_parallel else Invariant()
    boundary = problem.boundary
    placements: dict[int, tuple[Placements, ...]] = {}
    for number, allowed in problem.placements.items():
        values = [boundary.value(slot) for slot in boundary.members[number]]
        streams = boundary.members[number][0].side != "param" and all(value.differentiable for value in values)
        kept = tuple(at for at in allowed if at[axis] == between) if streams and values[0].shape else ()
        slot = boundary.members[number][0]
        if slot.side == "param" and boundary.parameter(slot).cut > 1 and not wanted.sliced_experts:
            kept = tuple(at for at in allowed if not isinstance(at[axis], Shard))
        placements[number] = kept or allowed
    blocks = {name: _cut_matrices(table, axis, wanted) for name, table in problem.blocks.items()}
    return replace(problem, placements=placements, blocks=blocks)


def _cut_matrices(table: BlockTable, axis: int, wanted: Forced) -> BlockTable:
    choices: dict[str, tuple[Choice, ...]] = {}
    for node in table.block.nodes:
        every = table.choices[node.name]
        choices[node.name] = tuple(choice for choice in every if _cuts_matrix(table, node, choice, axis, wanted)) or every
    return replace(table, choices=choices)


def _cuts_matrix(table: BlockTable, node: Node, choice: Choice, axis: int, wanted: Forced) -> bool:
    """Whether every matrix among the operands is cut; a table of words along its rows, the vocabulary."""
    parameters = {parameter.value.name: parameter.value for parameter in table.block.parameters if not parameter.buffer}
    lookup = packet(node.op) == "aten.embedding"
    if node.op in EXPERTS and not wanted.sliced_experts:
        return isinstance(choice.plan.operands[0][axis], Shard) and not isinstance(choice.plan.operands[2][axis], Shard)
    for name, at in zip(node.operands(), choice.plan.operands, strict=True):
        if name in parameters and len(parameters[name].shape) > 1 and packet(node.op) in _MATRIX_OPS:
            cut = at[axis]
            if not isinstance(cut, Shard) or (lookup and cut.dim != 0):
                return False
    return True


_PRODUCTS = frozenset(["aten.linear", "ap.linear_kn", "ap.linear_float8", "aten.mm", "aten.matmul", "aten.addmm", "aten.bmm"])
_MATRIX_OPS = _PRODUCTS | EXPERTS | {"aten.embedding"}
