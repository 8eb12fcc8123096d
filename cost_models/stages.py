"""The stages of a candidate: what each of them owns, its clock per micro-batch, and when it ends on the pipeline's schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.devices import AxisLink, Device, Link
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.cost_models.pipeline import StageSeconds, run_schedule
from autopar.cost_models.simulate import Part, Steps, simulate
from autopar.cost_models.sizes import itemsize
from autopar.cost_models.stage_groups import stage_parts
from autopar.cost_models.state import Optimizer, StateCost, group_of
from autopar.cost_models.trace import NO_LINKS, Run
from autopar.cost_models.traffic import Traffic
from autopar.ir.chunks import chunk_calls, chunks_of_ranks, rank_of_chunks
from autopar.ir.graph import Graph, Parameter
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.placement import Placements, Shard
from autopar.ir.plan import Candidate
from autopar.ir.stages import Piece, joined, repeatable
from autopar.schedules.clock import ChunkSeconds


@dataclass(frozen=True, slots=True)
class Owned:
    """The state of some consecutive calls: of each call's own parameters, and (`root`) of those that several of them share, which
    are one group, gathered before the first call, not resharded, and reduced after the last."""

    calls: tuple[int, ...]
    states: tuple[StateCost, ...]
    root: StateCost
    root_zero: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one chunk owns, and its clock. `weight_seconds` of a backward may be put off (gradients of weights)."""

    owned: Owned
    steps: Steps
    traffic: tuple[Traffic, ...]
    send_seconds: float
    """To the next chunk; the gradient comes back in the same time."""
    weight_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTime:
    """One pipeline stage. It is busy, then still has `tail_seconds` of the data axis to wait for, then the optimizer; the rest of
    `end_seconds` is its bubble. `sent_seconds` is what it sends to other stages in a step, hidden or not."""

    calls: tuple[int, ...]
    busy_seconds: float
    bubble_seconds: float
    tail_seconds: float
    optimizer_seconds: float
    end_seconds: float
    sent_seconds: float = 0.0


def owned_by(calls: Sequence[int], graph: Graph, candidate: Candidate, runs: Mapping[str, Run], optimizer: Optimizer) -> Owned:
    """What these calls own."""
    chosen = [graph.calls[index] for index in calls]
    users = Counter(name for call in chosen for name in set(call.parameters))
    shared: dict[str, tuple[Parameter, Placements]] = {}
    shared_zero = 0
    memo: dict[tuple[str, tuple[bool, ...]], StateCost] = {}
    states = []
    for call in chosen:
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
    root = any_run.costs.state(shared.values(), shared_zero, candidate.precision, optimizer)
    return Owned(tuple(calls), tuple(states), root, shared_zero)


def chunks(
    graph: Graph, candidate: Candidate, cluster: Cluster, runs_of: Sequence[Mapping[str, Run]], optimizer: Optimizer
) -> tuple[Chunk, ...]:
    """Every chunk of the pipeline, in the model's order. `cluster` is the whole one, `runs_of` are the blocks on each stage."""
    pipeline, mesh, many = candidate.pipeline, candidate.mesh, candidate.micro_batches
    parts_of = stage_parts(cluster, pipeline.stages)
    datas = [links_of_axis(part, mesh, mesh.index(DATA_AXIS)) for part in parts_of]
    layout = chunk_calls(graph, pipeline)
    ranks = rank_of_chunks(pipeline)
    links = [stage_link(cluster, candidate, *pair) for pair in zip(ranks, ranks[1:], strict=False)]
    sends = [
        send_seconds(graph, runs_of[ranks[index]], after[0], pipeline.repeated, link) if ranks[index] != ranks[index + 1] else 0.0
        for index, (after, link) in enumerate(zip(layout[1:], links, strict=True))
    ]
    used = [0.0, *(sent if datas[0].shares(link) else 0.0 for sent, link in zip(sends, links, strict=True)), 0.0]
    makers = repeatable(graph) if pipeline.repeated else {}
    out = []
    for index, (calls, sent) in enumerate(zip(layout, [*sends, 0.0], strict=True)):
        rank = ranks[index]
        runs, data, device = runs_of[rank], datas[rank], parts_of[rank].device
        owned = owned_by(calls, graph, candidate, runs, optimizer)

        def traffic(state: StateCost, zero: int, shards: int = data.size, device: Device = device) -> Traffic:
            return Traffic.of(state, zero, candidate.zero_group or shards, device, candidate.precision, many)

        mine = [runs[graph.calls[number].block] for number in calls]
        each = [traffic(state, run.plan.zero) for state, run in zip(owned.states, mine, strict=True)]
        root = traffic(owned.root, owned.root_zero)
        parts = [Part(run.forward, run.backward, moved) for run, moved in zip(mine, each, strict=True)]
        if again := _repeated_seconds(graph, pipeline.repeated, makers, calls, runs):
            parts[0] = replace(parts[0], forward=((again, NO_LINKS), *parts[0].forward))
        steps = simulate(parts, root, data.names, many, len(layout) == 1, cluster.overlap, max(used[index : index + 2]))
        out.append(Chunk(owned, steps, (*each, root), sent, sum(run.weight_seconds for run in mine)))
    return tuple(out)


def _repeated_seconds(
    graph: Graph, repeated: Collection[str], makers: Mapping[str, Sequence[Piece]], calls: Sequence[int], runs: Mapping[str, Run]
) -> float:
    """What a chunk of these calls spends on values that it makes for itself: other chunks' nodes, forward only."""
    read = {name for index in calls for name in graph.calls[index].inputs}
    made = {name for index in calls for name in graph.calls[index].outputs}
    pieces = joined(graph, [makers[name] for name in repeated if name in read and name not in made])
    return sum(piece_seconds(graph, piece, runs) for piece in pieces if piece.call not in calls)


def piece_seconds(graph: Graph, piece: Piece, runs: Mapping[str, Run]) -> float:
    """One forward of some nodes of a call."""
    run = runs[graph.calls[piece.call].block]
    plans = {plan.node: plan for plan in run.plan.nodes}
    return sum(run.costs.node(plans[name]).forward_seconds for name in piece.nodes)


def send_seconds(graph: Graph, runs: Mapping[str, Run], cut: int, repeated: Collection[str], link: AxisLink) -> float:
    """One transfer over the cut before call `cut`. Where sends are scattered each rank of a model axis sends its part of what
    they have in common (arXiv 2104.04473, section 4.1), and the parts are gathered where they arrive."""
    costs = next(iter(runs.values())).costs
    whole = cut_bytes(graph, runs, cut, repeated)
    if not costs.cluster.overlap.sends_scattered:
        return collective_seconds("point_to_point", whole, link)
    data = costs.mesh.index(DATA_AXIS)
    axes = [axis for axis, size in enumerate(costs.mesh.sizes) if axis != data and size > 1]
    part = cut_bytes(graph, runs, cut, repeated, prod(costs.mesh.sizes[axis] for axis in axes))
    gathers = [collective_seconds("all_gather", whole, links_of_axis(costs.cluster, costs.mesh, axis)) for axis in axes]
    return collective_seconds("point_to_point", part, link) + (sum(gathers) if part < whole else 0.0)


def cut_bytes(
    graph: Graph, runs: Mapping[str, Run], cut: int, repeated: Collection[str] = (), parts: int = 1, backward: bool = False
) -> float:
    """What one device sends over the cut before call `cut` for a micro-batch: every value that is made up to it, used behind it
    and not `repeated`; `backward`, the gradients of those that have one. A device sends one of `parts` of what is equal on the
    model axes."""
    data = next(iter(runs.values())).costs.mesh.index(DATA_AXIS)
    used = {name for call in graph.calls[cut:] for name in call.inputs} - set(repeated)
    total = 0.0
    for call in graph.calls[:cut]:
        if used.isdisjoint(call.outputs):
            continue
        run = runs[call.block]
        for name, inner, at in zip(call.outputs, run.costs.block.outputs, run.plan.outputs, strict=True):
            if name in used and (run.costs.values[inner].differentiable or not backward):
                cut_by_model = any(type(place) is Shard for axis, place in enumerate(at) if axis != data)
                total += run.costs.value_bytes(inner, at) / (1 if cut_by_model else parts)
    return total


def stage_link(cluster: Cluster, candidate: Candidate, stage: int, other: int) -> AxisLink:
    """What joins two stages of a candidate."""
    return link_of_stages(cluster, candidate.mesh.size, stage, other)


def link_of_stages(cluster: Cluster, size: int, stage: int, other: int) -> AxisLink:
    """What joins two stages of `size` devices; stages are the outermost axis, so ranks that talk are multiples of that apart."""
    here, there = stage * size, other * size
    joined = (
        link for link in cluster.links if all((here + r) // link.devices == (there + r) // link.devices for r in (0, size - 1))
    )
    return _between(cluster, size, next(joined, cluster.links[-1]), 2)


def _between(cluster: Cluster, size: int, link: Link, stages: int) -> AxisLink:
    """`stages` stages of `size` devices on one link."""
    mesh = Mesh((Axis("pp", stages), Axis("rest", size)))
    return links_of_axis(replace(cluster, size=mesh.size, links=(link,)), mesh, 0)


def stage_times(
    graph: Graph, candidate: Candidate, cluster: Cluster, runs_of: Sequence[Mapping[str, Run]], made: Sequence[Chunk]
) -> tuple[StageTime, ...]:
    """When each stage ends."""
    pipeline = candidate.pipeline
    if len(made) == 1:
        (one,) = made
        steps = one.steps
        tail = steps.last_backward.tail_seconds
        busy = steps.forward_seconds + steps.backward_seconds - tail
        optimizer = sum(moved.optimizer_seconds for moved in one.traffic)
        return (StageTime(one.owned.calls, busy, 0.0, tail, optimizer, busy + tail + optimizer),)
    seconds = chunk_seconds(made)
    schedule = run_schedule(
        pipeline, candidate.micro_batches, seconds, [chunk.send_seconds for chunk in made[:-1]], cluster.overlap.sends_block
    )
    ties = _tied_seconds(graph, candidate, cluster, runs_of[0], made)
    many = candidate.micro_batches
    places = chunks_of_ranks(pipeline)
    return tuple(_stage(places[stage], many, each, made, ties.get(stage, 0.0)) for stage, each in enumerate(schedule))


def _stage(places: Sequence[int], many: int, clock: StageSeconds, made: Sequence[Chunk], tied_seconds: float) -> StageTime:
    mine = [made[index] for index in places]
    # The last backward of the chunks runs from the last one to the first: what the others reduce last runs behind it.
    tail, idle = 0.0, 0.0
    for chunk in reversed(mine):
        last = chunk.steps.last_backward
        idle = last.seconds - last.waited_seconds
        tail = max(0.0, tail - idle) + last.tail_seconds
    tail += tied_seconds
    optimizer = sum(moved.optimizer_seconds for chunk in mine for moved in chunk.traffic)
    calls = tuple(index for chunk in mine for index in chunk.owned.calls)
    end = clock.end_seconds + tail + optimizer
    sent = many * sum(made[index].send_seconds + (made[index - 1].send_seconds if index else 0.0) for index in places)
    return StageTime(calls, clock.busy_seconds, clock.bubble_seconds, tail, optimizer, end, sent)


def chunk_seconds(made: Sequence[Chunk]) -> list[ChunkSeconds]:
    """What the schedule's clock runs. Weights that are gathered once arrive while a stage still waits for its first
    micro-batch."""
    out, before = [], 0.0
    for chunk in made:
        steps = chunk.steps
        first = steps.first_forward.seconds
        if not any(moved.gather_later for moved in chunk.traffic):
            first -= min(before, steps.first_forward.waited_seconds)
        before += first + chunk.send_seconds
        last = steps.last_backward.seconds - steps.last_backward.tail_seconds
        weight = min(chunk.weight_seconds, steps.backward.seconds)
        out.append(ChunkSeconds(steps.forward.seconds, steps.backward.seconds, first, last, weight_backward=weight))
    return out


def _tied_seconds(
    graph: Graph, candidate: Candidate, cluster: Cluster, runs: Mapping[str, Run], made: Sequence[Chunk]
) -> dict[int, float]:
    """Per stage: parameters that calls of several stages share have a copy on each, whose gradients are summed at the end."""
    mesh, ranks = candidate.mesh, rank_of_chunks(candidate.pipeline)
    where: dict[str, set[int]] = {}
    sizes: dict[str, float] = {}
    for index, chunk in enumerate(made):
        for call in (graph.calls[number] for number in chunk.owned.calls):
            run = runs[call.block]
            for name, parameter, at in zip(call.parameters, run.costs.block.parameters, run.plan.parameters, strict=True):
                where.setdefault(name, set()).add(ranks[index])
                shards = (candidate.zero_group or mesh.size_of(DATA_AXIS)) if run.plan.zero else 1
                sizes[name] = group_of([(parameter, at)], mesh).trainable * itemsize(candidate.precision.master) / shards
    out: dict[int, float] = {}
    for name, users in where.items():
        if len(users) > 1 and sizes[name]:
            link = _between(cluster, mesh.size, cluster.links[-1], len(users))
            seconds = collective_seconds("all_reduce", sizes[name], link)
            for stage in users:
                out[stage] = out.get(stage, 0.0) + seconds
    return out
