"""What is said where nothing fits: the evaluator's own figures, and changes after which a search does find a plan."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import llama_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import Infeasible
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.solve.bounds.minimum_memory import MinimumMemory
from autopar.solve.infeasible import Relaxation, enlarged, explanation, minimum_memory_plan, relaxations
from autopar.solve.search import search
from autopar.solve.space.grid import devices_per_node, grid_points
from autopar.solve.space.options import SearchOptions

LARGE = SearchOptions(precision=Precision("bfloat16", "float32"))


def small(batch: int = 8) -> Graph:
    return gpt2_graph(layers=2, hidden=128, heads=4, vocabulary=512, seq=64, batch=batch)


def look() -> MinimumMemory:
    return MinimumMemory(default_registry(), inf)


def sized(cluster: Cluster, memory_bytes: float, host: bool = True) -> Cluster:
    device = replace(cluster.device, memory_bytes=int(memory_bytes))
    return replace(cluster, device=device, host=cluster.host if host else None)


def least(graph: Graph, cluster: Cluster, options: SearchOptions) -> float:
    """Of the plan that takes least memory, where hardly anything is there."""
    found = minimum_memory_plan(graph, sized(cluster, cluster.device.base_bytes + 2**20), options, look())
    assert found is not None
    return found.evaluation.peak_memory_bytes


def found_for(graph: Graph, cluster: Cluster, options: SearchOptions) -> dict[str, Relaxation]:
    return {each.change: each for each in relaxations(graph, cluster, options, look())}


def test_the_shortage_is_that_of_the_minimum_memory_plan_and_names_the_event_and_the_kind() -> None:
    graph, whole = small(), Cluster.parse("local:2")
    need = least(graph, whole, SearchOptions())
    tight = sized(whole, need - 2**20)
    nearest = minimum_memory_plan(graph, tight, SearchOptions(), look())
    assert nearest is not None and nearest.shortage_bytes == pytest.approx(2**20, rel=0.5)
    assert nearest.evaluation == evaluate(graph, nearest.candidate, tight)
    text = explanation(graph, tight, SearchOptions(), default_registry())
    stage = nearest.evaluation.stage_memory[0]
    first, *others = text.splitlines()
    assert f"short of {nearest.shortage_bytes / 2**20:.1f} MiB at the {stage.place}" in first
    kind = max(stage.table.items(), key=lambda row: row[1])[0]
    assert kind == "base" and "the framework's base takes" in first
    assert others[0].startswith("  use ") and all(line.startswith("  or ") for line in others[1:])
    with pytest.raises(Infeasible):
        search(graph, tight, SearchOptions())


def test_every_change_makes_the_search_succeed() -> None:
    graph, whole = small(), Cluster.parse("local:2")
    tight = sized(whole, least(graph, whole, SearchOptions()) - 2**16)
    found = found_for(graph, tight, SearchOptions())
    assert {name.split()[-1] if name[0].isdigit() else name.split()[1] for name in found} == {"batch", "devices"}
    for name, each in found.items():
        words = name.split()
        if words[1] == "devices":
            answer = search(graph, enlarged(tight, int(words[0])), SearchOptions())
        else:
            answer = search(graph, tight, SearchOptions(batch=int(words[-1])))
        assert answer.evaluation.fits and each.plan.evaluation.fits


@pytest.mark.slow
def test_the_number_of_nodes_is_the_smallest() -> None:
    """By the exact look at every smaller number for which there is a mesh at all."""
    graph = llama_graph(layers=80, batch=64, hidden=8192, heads=64, ffn=28672)
    cluster = Cluster.parse("dgx-h100:1")
    found = found_for(graph, cluster, LARGE)
    (name,) = [name for name in found if name.endswith("nodes")]
    assert name == "4 nodes"
    for nodes in range(1, 4):
        other = enlarged(cluster, nodes)
        assert grid_points(graph, other.size, devices_per_node(other), {}, default_registry())
        closest = look().solved_plan(graph, other, LARGE)
        assert closest is not None and closest.shortage_bytes > 0


def test_the_batch_is_the_largest_that_fits() -> None:
    graph, whole = small(batch=12), Cluster.parse("local:2")
    options = SearchOptions(force={"dp": 2, "micro": 2})
    need = {batch: least(replace(graph, batch=batch), whole, options) for batch in (4, 12)}
    tight = sized(whole, (need[4] + need[12]) / 2)
    (name,) = [name for name in found_for(graph, tight, options) if "batch of" in name]
    assert name == "a batch of 4"


def test_forced_options_that_are_in_the_way() -> None:
    graph, cluster = llama_graph(layers=8, batch=64), Cluster.parse("dgx-h100:1")
    options = replace(LARGE, force={"dp": 8, "micro": 8, "zero": 3})
    tight = sized(cluster, 0.6 * least(graph, cluster, options), host=False)
    found = found_for(graph, tight, options)
    assert "the same without forcing micro=8" in found and "the same without forcing zero=3" not in found
    answer = search(graph, tight, replace(options, force={"dp": 8, "zero": 3}))
    assert answer.evaluation.fits


def test_a_host_is_named_where_the_cluster_has_none() -> None:
    """One device, one example: only offloading reduces memory."""
    graph = llama_graph(layers=64, batch=1, seq=32768, hidden=128, heads=2, kv_heads=2, ffn=128)
    cluster = Cluster.parse("dgx-h100:1")
    one = replace(cluster, size=1, links=cluster.links[:1])
    bare = minimum_memory_plan(graph, sized(one, one.device.base_bytes + 2**20, host=False), LARGE, look())
    hosted = minimum_memory_plan(graph, sized(one, one.device.base_bytes + 2**20), LARGE, look())
    assert bare is not None and hosted is not None
    between = (bare.evaluation.peak_memory_bytes + hosted.evaluation.peak_memory_bytes) / 2
    assert hosted.evaluation.peak_memory_bytes < 0.99 * bare.evaluation.peak_memory_bytes
    found = found_for(graph, sized(one, between, host=False), LARGE)
    (name,) = [name for name in found if "host" in name]
    assert any(plan.offload for plan in found[name].plan.candidate.blocks)
