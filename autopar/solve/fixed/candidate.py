"""The candidate of a fixed configuration, and its price: nothing is searched, so `plan` says what `validate` says of it.
Configurations that somebody knows to be good are candidates of the search too, priced on the model itself with our programs'
constants, so that a plan is never predicted to be slower than them.

Placements of its blocks come from the planner's own tables and ILP with everything pinned that the configuration says: matrices
are cut on the tensor axis (that is what tensor parallelism means), between layers values are whole (`I`) or cut along the
sequence (``S(1)``, sequence parallelism), lookups and the head are cut by vocabulary (arXiv 1909.08053, section 3; 2205.05198,
4.2). What is left open is decided on a *reference* cluster (bandwidth only, one example per data rank). So placements are a
function of the graph's blocks and the degrees of the model axes alone, and not of micro-batch, depth, data degree, devices or
links.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device, Link
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import with_all_offloaded
from autopar.errors import BatchError, Infeasible
from autopar.ir.graph import Graph, Node
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.placement import Invariant, Placement, Placements, Shard
from autopar.ir.plan import BlockPlan, Candidate, Pipeline
from autopar.operations.losses import runs_in_chunks
from autopar.operations.table import operation
from autopar.rules.registry import Registry, default_registry
from autopar.solve.fixed.configuration import TENSOR_AXIS, FixedConfiguration, mesh_of_stage
from autopar.solve.fixed.recomputation import with_recomputation
from autopar.solve.ilp import solver as ilp
from autopar.solve.ilp.decode import decode
from autopar.solve.ilp.formulate import formulate
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, PricedPlan
from autopar.solve.problem.problem import BlockTable, NodeStrategy, Problem, build_problem
from autopar.solve.result import PlanResult
from autopar.solve.space.force import check_recompute
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions


def fixed_candidate(
    graph: Graph,
    cluster: Cluster,
    fixed: FixedConfiguration,
    placed: BlockPlacements | None = None,
    registry: Registry | None = None,
) -> Candidate:
    """The candidate. `placed` is `place_blocks` of this graph's blocks and degrees, where the caller has it.

    ClusterError where degrees do not multiply to the cluster, BatchError where the batch gives no example to a data rank or
    micro-batch, Infeasible where an operation cannot be placed so.
    """
    mesh = mesh_of_stage(cluster, fixed)
    check_recompute(fixed.recompute)
    if graph.batch < fixed.micro_batches:
        raise BatchError(f"a batch of {graph.batch} has no {fixed.micro_batches} micro-batches: force fewer")
    data = mesh.size_of(DATA_AXIS)
    placed = placed if placed is not None else place_blocks(graph, fixed, registry)
    repeated = set(fixed.recomputed_blocks) or {block.name for block in graph.blocks if graph.count(block.name) > 1}
    zero = fixed.zero if data > 1 else 0
    sharded = [plan if plan.zero == zero else replace(plan, zero=zero) for plan in placed]
    plans = [with_recomputation(graph.block(plan.block), plan, fixed, repeated) for plan in sharded]
    return Candidate(
        mesh=mesh,
        blocks=tuple(
            with_all_offloaded(BlockCosts(graph.block(plan.block), mesh, graph.batch, cluster, 0), plan)
            if plan.block in fixed.offloaded_blocks
            else plan
            for plan in plans
        ),
        batch=graph.batch,
        precision=fixed.precision,
        micro_batches=fixed.micro_batches,
        zero_group=fixed.zero_group if fixed.zero_group < data else 0,
        pipeline=Pipeline(
            fixed.pp,
            fixed.virtual,
            fixed.schedule,
            fixed.layers,
            repeated=tuple(repeatable_values(graph)) if fixed.pp > 1 else (),
            weight_versions=fixed.weight_versions,
        ),
    )


def price_configuration(graph: Graph, cluster: Cluster, fixed: FixedConfiguration, registry: Registry) -> PlanResult:
    """The configuration as the only plan. Where it does not fit, its status is INFEASIBLE: it can be inspected."""
    candidate = fixed_candidate(graph, cluster, fixed, registry=registry)
    evaluation = evaluate(graph, candidate, cluster, fixed.optimizer)
    status = Status.OPTIMAL if evaluation.fits else Status.INFEASIBLE
    solution = MeshSolution(
        GridPoint(candidate.mesh, candidate.micro_batches, candidate.zero_group),
        status=status,
        bound_seconds=evaluation.step_seconds if evaluation.fits else inf,
        plan=PricedPlan(candidate, evaluation),
    )
    return PlanResult(
        graph=graph,
        candidate=candidate,
        evaluation=evaluation,
        status=status,
        lower_bound_seconds=evaluation.step_seconds,
        gap=0.0,
        solutions=(solution,),
    )


def may_seed(options: SearchOptions) -> bool:
    """Return whether nothing is forced: seeds obey nothing."""
    fixed = options.force or options.schedule or options.pins or options.stored or options.placed
    return not fixed and not options.precision.offload_optimizer


def with_seeds(options: SearchOptions, result: PlanResult, seeds: Iterable[PlanResult]) -> PlanResult:
    """Return `result`, or the fastest of `seeds` where that fits and is predicted to be faster; those that fit are among the
    alternatives. Seeds are priced configurations (`candidate.price_configuration`) of the same model, batch and cluster.
    Unchanged where anything is forced: seeds obey nothing."""
    if not may_seed(options):
        return result
    priced = [each for each in seeds if each.evaluation.fits]
    if not priced:
        return result
    result = replace(result, alternatives=(*result.alternatives, *(solution for each in priced for solution in each.solutions)))
    best = min(priced, key=lambda each: each.evaluation.step_seconds)
    if best.evaluation.step_seconds >= result.evaluation.step_seconds:
        return result
    return result.with_plan(best.graph, PricedPlan(best.candidate, best.evaluation))


BlockPlacements = tuple[BlockPlan, ...]
"""The blocks' placements on (data, model axes), without state sharding and recomputation."""


def place_blocks(graph: Graph, fixed: FixedConfiguration, registry: Registry | None = None) -> BlockPlacements:
    """Placements of every block on (data, tp). A function of the blocks and of `fixed`'s model axes only."""
    axes = [Axis(DATA_AXIS, 2)] + ([Axis(TENSOR_AXIS, fixed.tp)] if fixed.tp > 1 else [])
    mesh = Mesh(tuple(axes))
    cluster = _reference(mesh)
    rules = registry or default_registry()
    precision = replace(fixed.precision, offload_optimizer="")  # the same placements; no host is described here
    problem = build_problem(replace(graph, batch=2), mesh, cluster, precision, fixed.optimizer, rules, (0,))
    problem = replace(problem, blocks={name: _without_chunks(table) for name, table in problem.blocks.items()})
    if fixed.tp > 1:
        problem = _pinned(problem, mesh.index(TENSOR_AXIS), fixed)
    form = formulate(problem)
    outcome = ilp.solve(form.model)
    if not outcome.values:
        raise Infeasible(
            f"{graph.name} cannot be placed with tp={fixed.tp}{', sequence parallel' if fixed.sequence_parallel else ''}: "
            "force another degree"
        )
    return decode(form, outcome.values).blocks


def _without_chunks(table: BlockTable) -> BlockTable:
    """The table of software that computes whole logits."""
    plain = {
        node: tuple(each for each in strategies if not runs_in_chunks(each.plan.function))
        for node, strategies in table.strategies.items()
    }
    return replace(table, strategies=plain)


def _reference(mesh: Mesh) -> Cluster:
    """Return a cluster of bandwidths alone, in the proportions of a node of today; no latency, so that no size is special."""
    device = Device("reference", "cuda", (("float32", 1e14),), 2**62, 2e12, 0.0, 1.0, 1.0, 1.0, 0)
    return Cluster("reference", device, (Link("reference", mesh.size, 2e11, 0.0),), mesh.size)


def _pinned(problem: Problem, axis: int, fixed: FixedConfiguration) -> Problem:
    """The tables without what the configuration forbids. What a table cannot do at all stays as it is (a replicated norm)."""
    between: Placement = Shard(1) if fixed.sequence_parallel else Invariant()
    boundary = problem.boundary
    placements: dict[int, tuple[Placements, ...]] = {}
    for number, allowed in problem.placements.items():
        values = [boundary.value(slot) for slot in boundary.members[number]]
        streams = boundary.members[number][0].side != "param" and all(value.differentiable for value in values)
        allowed_here = tuple(at for at in allowed if at[axis] == between) if streams and values[0].shape else ()
        slot = boundary.members[number][0]
        experts = problem.blocks[slot.block].costs.expert_degrees
        if slot.side == "param" and boundary.parameter(slot) in experts and not fixed.sliced_experts:
            allowed_here = tuple(at for at in allowed if not isinstance(at[axis], Shard))
        placements[number] = allowed_here or allowed
    blocks = {name: _cut_matrices(table, axis, fixed) for name, table in problem.blocks.items()}
    return replace(problem, placements=placements, blocks=blocks)


def _cut_matrices(table: BlockTable, axis: int, fixed: FixedConfiguration) -> BlockTable:
    choices: dict[str, tuple[NodeStrategy, ...]] = {}
    for node in table.block.nodes:
        every = table.strategies[node.name]
        choices[node.name] = tuple(choice for choice in every if _cuts_matrix(table, node, choice, axis, fixed)) or every
    return replace(table, strategies=choices)


def _cuts_matrix(table: BlockTable, node: Node, choice: NodeStrategy, axis: int, fixed: FixedConfiguration) -> bool:
    """Return whether every matrix among the operands is cut; a table of words along its rows, the vocabulary."""
    parameters = {parameter.value.name: parameter.value for parameter in table.block.parameters if not parameter.buffer}
    record = operation(node.op)
    if record.experts and not fixed.sliced_experts:
        return isinstance(choice.plan.operands[0][axis], Shard) and not isinstance(choice.plan.operands[2][axis], Shard)
    has_matrices = record.product or record.experts or record.embedding
    for name, at in zip(node.operands(), choice.plan.operands, strict=True):
        if name in parameters and len(parameters[name].shape) > 1 and has_matrices:
            cut = at[axis]
            if not isinstance(cut, Shard) or (record.embedding and cut.dim != 0):
                return False
    return True
