"""The plan of a variant: the mesh, the pipeline and the stored placements of parameters are those of the first program.

The graph of a variant is cut into the model chunks that the weights of the first program are on, and takes over the decisions
of its plan where it has the same structure and other sizes (another length, another batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import gcd, inf

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.stage_devices import stage_cluster
from autopar.errors import AutoparError, PlanMismatch
from autopar.ir.batch_totals import why_one_graph
from autopar.ir.graph import Block, Call, Graph
from autopar.ir.interface import Output
from autopar.ir.mesh import CONTEXT_AXIS, DATA_AXIS, Axis, Mesh
from autopar.ir.pipeline.split_blocks import split_like
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.placement import Placements, Replicate
from autopar.ir.plan import BlockPlan, Candidate, Pipeline
from autopar.ir.plan_file.plan_file import Plan
from autopar.operations.table import operation
from autopar.passes.lower import lower
from autopar.rules.check import check_strategies
from autopar.rules.registry import Registry
from autopar.runtime.variants import LOGGER
from autopar.schedules.pipeline_schedule import check_schedule, chunks_of_stages
from autopar.solve.ilp.solve_mesh import MeshSolution, MeshSolver
from autopar.solve.inference import stored_placements
from autopar.solve.problem.structure import Placed
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.meshes import divisors
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables
from autopar.variants.cut import cut_like

_GAP = 1e-3

Planned = tuple[Graph, Candidate]


def plan_variant(graph: Graph, plan: Plan, cluster: Cluster, registry: Registry, placed: Placed | None = None) -> Planned:
    """The graph and its candidate. Where the graph is that of the plan at other sizes, the plan's decisions hold; else they are
    solved for. Where a batch does not divide over the data ranks, their shards of it differ by one example; where the graph does
    not allow that, or there are too few examples, ranks that share an example shard its sequence (`CONTEXT_AXIS`), and else each
    of them computes the whole (dp=1 in the candidate). `placed`: placements of inputs and results that are
    given, with which a batch is not split, nor in uneven shards.

    PlanMismatch where no plan of the graph has the mesh, the stages and the stored placements of `plan`.
    """
    if plan.candidate.pipeline.stages > 1 and (reason := why_one_graph(graph)):
        raise PlanMismatch(
            f"{reason}, which a pipeline cannot have: call it under torch.no_grad() where nothing trains by it, or plan with "
            'force="pp=1"'
        )
    problems: list[str] = []
    same = None if placed else in_structure_of(split_like(graph, plan.graph), plan.graph)
    most = plan.candidate.mesh.size_of(DATA_AXIS)
    local = any(operation(node.op).rank_statistics for block in graph.blocks for node in block.nodes)
    shares_examples = plan.candidate.pipeline.stages == 1 and not local
    for data, parts in _divisions(graph, plan.candidate, split=not placed):
        makers: list[tuple[Graph | None, Callable[..., Planned]]] = [(same, _resized), (graph, partial(_solved, placed=placed))]
        if data < most and shares_examples and not placed:
            makers.insert(0, (graph, partial(_solved, context=most // gcd(graph.batch // parts, most))))
        for taken, make in makers:
            if taken is None:
                continue
            try:
                even = replace(taken, batch=-(-taken.batch // data) * data)
                found, candidate = make(even, plan, cluster, registry, data, parts)
                check_schedule(candidate)
                uneven = graph.batch % data != 0
                if uneven:
                    found, candidate = replace(found, batch=graph.batch), replace(candidate, batch=graph.batch)
                lower(found, candidate, uneven=uneven)
                if graph.batch % most and problems:
                    LOGGER.info("no uneven shards of %d examples over dp=%d: %s", graph.batch, most, problems[0])
                return found, candidate
            except (AutoparError, ValueError) as error:
                problems.append(str(error))
    reason = problems[0] if problems else f"it has {graph.batch} examples"
    raise PlanMismatch(
        f"{graph.name}: this call cannot run with the weights as the first program places them ({reason}): call it like the "
        "example inputs, or plan with example inputs of this kind"
    )


def _divisions(graph: Graph, first: Candidate, split: bool) -> Iterator[tuple[int, int]]:
    """(data ranks that share the batch, micro-batches), the best first: as planned, in fewer micro-batches, in uneven shards,
    whole on every data rank."""
    data, most = first.mesh.size_of(DATA_AXIS), first.micro_batches
    if not (split and graph.batch_is_symbolic) or why_one_graph(graph):
        most = 1
    for ranks in dict.fromkeys((data, 1)):
        if graph.batch % ranks == 0:
            yield from ((ranks, parts) for parts in reversed(divisors(graph.batch // ranks)) if parts <= most)
        elif split and graph.batch > ranks and graph.batch_is_symbolic and first.pipeline.stages == 1:
            yield ranks, 1


def _mesh(first: Candidate, data: int) -> Mesh:
    return Mesh(tuple(Axis(axis.name, data) if axis.name == DATA_AXIS else axis for axis in first.mesh.axes))


def _resized(graph: Graph, plan: Plan, cluster: Cluster, registry: Registry, data: int, parts: int) -> Planned:
    """The plan's decisions at the sizes of `graph`."""
    first = plan.candidate
    candidate = replace(
        first, mesh=_mesh(first, data), batch=graph.batch, micro_batches=parts, zero_group=0,
        pipeline=_schedule_for(first, parts, first.pipeline),
    )  # fmt: skip
    check_strategies(graph, candidate, registry)
    return graph, candidate


def _schedule_for(first: Candidate, parts: int, pipeline: Pipeline) -> Pipeline:
    """The schedule of the plan. For another number of micro-batches all forwards and then all backwards (GPipe, arXiv
    1811.06965), with every model chunk where its weights are."""
    if parts == first.micro_batches or pipeline.stages == 1:
        return pipeline
    lines = []
    for chunks in chunks_of_stages(pipeline):
        forwards = [f"{chunk}F{number}" for chunk in chunks for number in range(parts)]
        lines.append(" ".join((*forwards, *(f"{chunk}B{number}" for chunk in reversed(chunks) for number in range(parts)))))
    return replace(pipeline, schedule="gpipe", actions="\n".join(lines))


def _solved(
    graph: Graph, plan: Plan, cluster: Cluster, registry: Registry, data: int, parts: int, *, placed: Placed | None = None,
    context: int = 1,
) -> Planned:  # fmt: skip
    """The best placements of operations where those of parameters are given; `context`: so many data ranks share an example, and
    shard its sequence."""
    first = plan.candidate
    unknown = sorted(graph.parameters().keys() - plan.graph.parameters().keys())
    if unknown:
        raise PlanMismatch(
            f"it reads {unknown[0]}, which the first program does not: call model.train(), and make all adapters active, before "
            "autopar.parallelize, and take example inputs with which the forward reads it and what other calls read (where an "
            "argument chooses between heads: a call that computes all of them, as of task=None)"
        )
    stored, mesh = stored_placements(plan.graph, first), _mesh(first, data)
    if context > 1:
        mesh = _mesh(first, first.mesh.size_of(DATA_AXIS) // context)
        at = mesh.index(DATA_AXIS) + 1
        mesh = Mesh((*mesh.axes[:at], Axis(CONTEXT_AXIS, context), *mesh.axes[at:]))
        stored = {name: (*places[:at], Replicate(), *places[at:]) for name, places in stored.items()}
    graph = _with_blocks_by_storage(graph, stored)
    pipeline = _schedule_for(first, parts, first.pipeline)
    if pipeline.stages > 1:
        graph, cuts = cut_like(graph, plan.graph, first.pipeline)
        pipeline = replace(pipeline, layers=(), cuts=cuts, repeated=tuple(repeatable_values(graph)))
    options = SearchOptions(
        batch=graph.batch, precision=first.precision, optimizer=plan.document.optimizer, stored=stored,
        placed=placed or {}, registry=registry, time_limit_seconds=inf,
    )  # fmt: skip
    zeros = (max((block.zero for block in first.blocks), default=0) if data > 1 else 0,)
    point = GridPoint(mesh, parts)
    ranks = stage_cluster(cluster, cluster.size // point.mesh.size)  # where every data rank computes the whole: one of them
    problem = ProblemTables(graph, ranks, options, registry).problem(point, zeros, ranks)
    solution = MeshSolution(point)
    solver = MeshSolver(graph, problem, (), _GAP, solution)
    solver.solve_without_memory(inf)
    if not solution.solved:
        solver.solve_with_memory(inf)
    if solution.plan is None:
        raise PlanMismatch("no placement of its operations fits those of the parameters")
    candidate = replace(solution.plan.candidate, batch=graph.batch, micro_batches=parts, zero_group=0, pipeline=pipeline)
    return graph, candidate


def _with_blocks_by_storage(graph: Graph, stored: Mapping[str, Placements]) -> Graph:
    """`graph` with a block of its own for calls whose parameters are stored in another way than those of other calls: with
    adapters the first layer is another block in training, whose input takes no gradient, and the same one without gradients."""
    places = [tuple(stored[name] for name in call.parameters) for call in graph.calls]
    plans = [BlockPlan(call.block, (), at, (), (), (), zero=0) for call, at in zip(graph.calls, places, strict=True)]
    return with_stage_variants(graph, plans)[0]


def in_structure_of(graph: Graph, planned: Graph) -> Graph | None:
    """Return `graph` with the blocks and calls of `planned`, whose operations it must have, one for one; None where it has
    others.

    A plan's graph may have several blocks for one captured block, where its calls have several plans.
    """
    if len(graph.calls) != len(planned.calls) or len(graph.inputs) != len(planned.inputs):
        return None
    names = {value.name: other.name for value, other in zip(graph.inputs, planned.inputs, strict=True)}
    blocks: dict[str, Block] = {}
    theirs = {block.name: block for block in planned.blocks}
    own = {block.name: block for block in graph.blocks}
    for call, other in zip(graph.calls, planned.calls, strict=True):
        block = own[call.block]
        if blocks.setdefault(other.block, block) is not block or not _same_call(call, other, names):
            return None
    if any(not _same_block(block, theirs[name]) for name, block in blocks.items()):
        return None
    results = names.get(graph.loss) == planned.loss and len(graph.outputs) == len(planned.outputs)
    if not results or any(names.get(a.value) != b.value for a, b in zip(graph.outputs, planned.outputs, strict=True)):
        return None
    inputs = tuple(replace(value, name=names[value.name]) for value in graph.inputs)
    renamed = [replace(block, name=name) for name, block in blocks.items()]
    order = [block.name for block in planned.blocks]
    return replace(
        graph,
        inputs=inputs,
        blocks=tuple(sorted(renamed, key=lambda block: order.index(block.name))),
        calls=planned.calls,
        loss=planned.loss,
        outputs=tuple(Output(each.path, names[each.value], each.kind) for each in graph.outputs),
    )


def _same_call(call: Call, other: Call, names: dict[str, str]) -> bool:
    """Return whether both calls read and make values at the same places; add what they make to `names`."""
    if (call.prefix, call.parameters) != (other.prefix, other.parameters) or len(call.outputs) != len(other.outputs):
        return False
    if [names.get(name) for name in call.inputs] != list(other.inputs):
        return False
    names.update(zip(call.outputs, other.outputs, strict=True))
    return True


def _same_block(block: Block, other: Block) -> bool:
    return list(_lines(block)) == list(_lines(other))


def _lines(block: Block) -> Iterator[object]:
    """All of a block but its sizes, names of blocks, and source lines."""
    yield block.outputs, block.updates
    for parameter in block.parameters:
        yield parameter.value, parameter.path, parameter.trainable, parameter.buffer
    yield [(value.name, len(value.shape), value.dtype, value.differentiable) for value in block.inputs]
    for node in block.nodes:
        yield node.op, node.operands(), node.no_grad, [key for key, _ in node.kwargs]
        yield [(value.name, len(value.shape), value.dtype, value.differentiable) for value in node.outputs]
