"""The candidate of a fixed configuration, and its price: nothing is searched, so `plan` says what `validate` says of it.
Configurations that somebody knows to be good are candidates of the search too, priced on the model itself with our programs'
constants, so that a plan is never predicted to be slower than them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import with_all_offloaded
from autopar.errors import BatchError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.plan import Candidate, Pipeline
from autopar.rules.registry import Registry
from autopar.solve.fixed.block_placements import BlockPlacements, place_blocks
from autopar.solve.fixed.configuration import FixedConfiguration, mesh_of_stage
from autopar.solve.fixed.recomputation import with_recomputation
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution, PricedPlan
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
