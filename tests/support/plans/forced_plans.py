"""Plans of forced degrees, asked for as users do: in the words of ``--force``."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import EXPERT_AXIS
from autopar.ir.plan import Candidate, Precision
from autopar.operations.losses import IN_CHUNKS, WITHIN_LOSS
from autopar.rules.loss_chunks import as_plain, loss_chains
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.force import Force, parse_force
from autopar.solve.space.options import SearchOptions
from support.harness.end_to_end import Prepared
from support.oracles.sharded_work import never_sharded, not_sharded

MODEL_AXES = ("tp", "tp2", "ep")


def world_of(force: str) -> int:
    """The devices that the degrees multiply to."""
    degrees = parse_force(force).degrees
    return prod(degrees.get(name, 1) for name in ("dp", "pp", *MODEL_AXES))


def forced_search(graph: Graph, force: str, batch: int = 0, dtype: str = "float32", cluster: Cluster | None = None) -> PlanResult:
    """On as many local devices as the degrees multiply to, without a pipeline unless one is forced."""
    asked: Force = parse_force(force)
    options = SearchOptions(
        batch=batch or graph.batch, precision=Precision(dtype, dtype), force={"pp": 1, **asked.degrees}, schedule=asked.schedule
    )
    return search(graph, cluster or Cluster.parse(f"local:{world_of(force)}"), options)


_MADE: dict[tuple[str, str], PlanResult] = {}


def forced_plan(prepared: Prepared, force: str) -> PlanResult:
    """Of a prepared model, made once."""
    key = prepared.graph.fingerprint, force
    if key not in _MADE:
        dtype = next(each.value.dtype for each in prepared.graph.parameters().values() if each.trainable)
        _MADE[key] = forced_search(prepared.graph, force, dtype=dtype)
    return _MADE[key]


def with_losses_in_chunks(graph: Graph, candidate: Candidate) -> Candidate:
    """The plan with each loss in chunks whose logits nothing converts between the head and the loss."""
    blocks = []
    for block, plan in zip(graph.blocks, candidate.blocks, strict=True):
        plans = {each.node: as_plain(each) for each in plan.nodes}
        for *within, loss in loss_chains(block):
            ends = [plans[each.name] for each in (*within, loss)]
            if all(a.results[0] == b.operands[0] for a, b in pairwise(ends)) and "P" not in str(ends[0].results):
                plans |= {each.name: replace(plans[each.name], function=WITHIN_LOSS) for each in within}
                plans[loss.name] = replace(plans[loss.name], function=IN_CHUNKS[plans[loss.name].function])
        blocks.append(replace(plan, nodes=tuple(plans.values())))
    return replace(candidate, blocks=tuple(blocks))


def whole_of_able(found: PlanResult, axis: str) -> float:
    """Of the FLOPs that some rule shards over the axis, the share that the plan computes on every one of its ranks."""
    never = never_sharded(found.graph, found.candidate.mesh.size_of(axis), any_size=axis == EXPERT_AXIS).share
    return (not_sharded(found.graph, found.candidate, axis).share - never) / (1 - never) if never < 1 else 0.0


@cache
def bundled_graph(name: str, batch: int = 16, seq: int | None = None) -> Graph:
    """Captured on the meta device."""
    from autopar.capture import capture
    from autopar.capture.models import load_model

    loaded = load_model(name, batch, seq, device="meta")
    example = loaded.example_inputs
    return capture(loaded.model, *(((), example) if isinstance(example, dict) else (example, {})))
