"""The search as a whole: baselines, certificate, forced degrees, and what it says when nothing fits."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.models.handwritten_blocks import Builder, gpt2_graph
from support.models.solver_graphs import graph_of, llama_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, BatchError, ClusterError, Infeasible, UnsupportedOp
from autopar.ir.plan import Precision
from autopar.ir.verify import verify_candidate
from autopar.solve.fixed.baselines import baselines
from autopar.solve.ilp.linear_model import Status
from autopar.solve.ilp.solve_mesh import MeshSolution
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.space.meshes import meshes
from autopar.solve.space.options import SearchOptions

BF16 = Precision("bfloat16", "float32")


def found(graph, cluster: str | Cluster, **options) -> PlanResult:
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    result = search(graph, cluster, SearchOptions(**options))
    verify_candidate(graph, result.candidate, cluster.size)
    assert result.warnings == ()
    assert result.lower_bound_seconds <= result.evaluation.step_seconds * (1 + 1e-9)
    assert result.evaluation.fits
    for each in result.solutions:
        if each.solved:
            assert 1 - 1e-6 <= each.step_seconds / each.objective_seconds <= 1.03
            assert each.bound_seconds <= each.step_seconds * (1 + 1e-6)
    return result


def small(batch: int = 8, layers: int = 3):
    return gpt2_graph(layers=layers, hidden=128, heads=4, vocabulary=512, seq=64, batch=batch)


@pytest.mark.parametrize("cluster", ["local:4", "dgx-h100:1", "dgx-a100:2"])
def test_evaluator_and_ilp_agree_and_baselines_are_never_better(cluster: str) -> None:
    result = found(small(batch=16), cluster, force={"pp": 1})
    recipes = baselines(small(batch=16), Cluster.parse(cluster), SearchOptions())
    for recipe in recipes:
        assert recipe.evaluation is not None or recipe.recipe.tensor
        assert not recipe.fits or result.evaluation.step_seconds <= recipe.evaluation.step_seconds * (1 + 1e-9)
    assert result.gap <= 1e-3
    assert result.status is Status.OPTIMAL


@pytest.mark.parametrize(("contention", "gap"), [pytest.param(0.0, 0.01, marks=pytest.mark.slow), (0.16, 0.015)])
def test_llama_on_four_nodes_in_bf16(contention: float, gap: float) -> None:
    """Contention slows data parallelism, which is the best plan; the bound of pipelines, which have less of it, has no bubble."""
    lines: list[str] = []
    graph, cluster = llama_graph(layers=32, batch=32), Cluster.parse("dgx-h100:4")
    cluster = replace(cluster, overlap=replace(cluster.overlap, contention=contention))
    result = search(graph, cluster, SearchOptions(precision=BF16), lines.append)
    assert result.warnings == ()
    assert result.gap <= gap
    assert {each.point.mesh for each in result.solutions if each.point.stages == 1} == set(meshes(32, 32, {}, 8))
    solved = [each for each in result.solutions if each.solved]
    assert all(any(text.startswith(f"{each!s:36}") for text in lines) for each in solved)
    pruned = [each for each in result.solutions if each.status is Status.PRUNED]
    left = [each for each in result.solutions if each.status is Status.NOT_TRIED]
    assert len(pruned) + len(left) + len(solved) == len(result.solutions)
    assert f"{len(pruned)} pruned by bounds, {len(left)} not tried" in lines[-1]
    _check_words(result, {Status.PRUNED: pruned, Status.NOT_TRIED: left})
    assert all(each.bound_seconds >= result.lower_bound_seconds for each in pruned)


def _check_words(result: PlanResult, by_status: dict[Status, list[MeshSolution]]) -> None:
    """Only what cannot be faster is called pruned; a bound below the plan is no reason, so that what is not tried has one."""
    best = result.evaluation.step_seconds
    assert all(each.bound_seconds >= 0.999 * best or each.reason for each in by_status[Status.PRUNED])
    for each in by_status[Status.NOT_TRIED]:
        assert each.bound_seconds < 0.999 * best and each.step_seconds is None
        assert each.reason.endswith("% less") and "its bound leaves room for" in each.reason


def test_what_was_not_tried_says_why() -> None:
    """Pipelines that estimates left out were called pruned by a bound that was far below the plan; and a pipeline that was priced
    with its schedule stood there once more without one, as pruned."""
    graph, cluster = llama_graph(layers=8, batch=16), Cluster.parse("dgx-h100:1")
    result = search(graph, cluster, SearchOptions(precision=BF16, time_limit_seconds=10.0))
    by_status = {status: [each for each in result.solutions if each.status is status] for status in Status}
    _check_words(result, by_status)
    assert any(each.point.stages > 1 for each in by_status[Status.NOT_TRIED])
    listed = plan_of_result(graph, cluster, result, (), optimizer="adamw").document.search.meshes
    names = [each.mesh for each in listed]
    assert len(names) == len(set(names))
    plain = {re.sub(r" \([^)]*\)", "", each.mesh) for each in listed if "(" in each.mesh}
    assert plain.isdisjoint(each.mesh for each in listed if each.step_seconds is None)
    assert all(each.reason for each in listed if each.status == "NOT TRIED")


@pytest.mark.parametrize(
    "force", [dict(dp=4), dict(dp=4, zero=1), dict(zero=2, dp=4), dict(dp=4, zero=3), dict(tp=4), dict(dp=2, tp=2, zero=3)]
)
def test_forced_degrees(force: dict[str, int]) -> None:
    result = found(small(), "local:4", force=force)
    mesh = result.candidate.mesh
    for name in ("dp", "tp"):
        assert name not in force or mesh.size_of(name) == force[name]
    if "zero" in force:
        assert {plan.zero for plan in result.candidate.blocks} == {force["zero"]}


@pytest.mark.parametrize("force", [dict(tp=4), dict(dp=2, tp=2), dict(tp=2, tp2=2)])
def test_a_forced_axis_repeats_hardly_any_flops(force: dict[str, int]) -> None:
    """Although on this cluster (slow links, tiny model) repeating everything would be faster."""
    result = found(small(), "local:4", force=force)
    for name, share in result.evaluation.redundant_share:
        assert name not in force or share <= 0.02


def test_zero_reacts_to_memory() -> None:
    graph = gpt2_graph(layers=12, batch=8)
    roomy = Cluster.parse("dgx-h100:1")
    loose, least = found(graph, roomy, force={"dp": 8}), found(graph, roomy, force={"dp": 8, "zero": 3})
    between = (loose.evaluation.peak_memory_bytes + least.evaluation.peak_memory_bytes) // 2
    tight = replace(roomy, device=replace(roomy.device, memory_bytes=between))
    pressed = found(graph, tight, force={"dp": 8})
    assert pressed.evaluation.peak_memory_bytes <= tight.device.memory_bytes
    assert pressed.evaluation.step_seconds >= loose.evaluation.step_seconds * (1 - 1e-9)


def test_state_is_sharded_where_replicated_state_does_not_fit() -> None:
    graph = gpt2_graph(layers=12, batch=8)
    cluster = Cluster.parse("dgx-h100:1")
    ddp, fsdp = (found(graph, cluster, force={"dp": 8, "zero": zero}).evaluation for zero in (0, 3))
    between = (ddp.peak_memory_bytes + fsdp.peak_memory_bytes) // 2
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=between))
    result = found(graph, tight, force={"dp": 8})
    assert any(plan.zero for plan in result.candidate.blocks)
    ddp = next(each for each in baselines(graph, tight, SearchOptions()) if each.recipe.key == "ddp")
    assert ddp.evaluation is not None and not ddp.fits and found(graph, tight).evaluation.fits


@pytest.mark.slow
def test_nothing_fits_says_what_is_short_and_what_would_do() -> None:
    """8 x 8 GiB hold no 8 billion parameters with their optimizer."""
    graph = llama_graph(layers=32, batch=512)
    roomy = Cluster.parse("dgx-h100:1")
    small = replace(roomy, device=replace(roomy.device, memory_bytes=8 * 2**30))
    with pytest.raises(Infeasible, match=r"short of \d+\.\d GiB .*\n  use \d+ nodes: then"):
        search(graph, small, SearchOptions(precision=BF16))


def test_hopeless_model_says_so_without_a_number() -> None:
    cluster = Cluster.parse("local:2")
    tiny = replace(cluster, device=replace(cluster.device, memory_bytes=cluster.device.base_bytes // 2))
    with pytest.raises(Infeasible, match="the framework's base takes"):
        search(small(), tiny, SearchOptions())


def test_batches_and_degrees_that_do_not_divide() -> None:
    cluster = Cluster.parse("local:4")
    with pytest.raises(BatchError, match="does not divide by dp=4"):
        search(small(batch=6), cluster, SearchOptions(force={"dp": 4}))
    with pytest.raises(ClusterError, match="tp=3 does not divide the 4 devices"):
        search(small(), cluster, SearchOptions(force={"tp": 3}))
    with pytest.raises(ClusterError, match="does not multiply to the 4"):
        search(small(), cluster, SearchOptions(force={"dp": 2, "tp": 4}))
    with pytest.raises(AutoparError, match="zero=7"):
        search(small(), cluster, SearchOptions(force={"zero": 7}))
    assert found(small(batch=6), cluster).candidate.mesh.size_of("dp") < 4
    ddp = next(each for each in baselines(small(batch=6), cluster, SearchOptions()) if each.recipe.key == "ddp")
    assert ddp.evaluation is None and ddp.problem


@pytest.mark.parametrize("name", ["model_parallel", "expert_dispatch"])
def test_overlap_of_other_software_is_refused(name: str) -> None:
    """The integer program adds up what it would hide, so that its bound would be none."""
    cluster = Cluster.parse("local:2")
    cluster = replace(cluster, overlap=replace(cluster.overlap, **{name: True}))
    with pytest.raises(ClusterError, match=rf"^[^\n]*have no overlap\.{name}[^\n]*--for megatron[^\n]*$"):
        search(gpt2_graph(layers=1, batch=4), cluster, SearchOptions())


def test_strict_names_the_operation_without_a_rule() -> None:
    b = Builder("Only")
    x = b.input("hidden", ("B", 16), differentiable=False)
    y = b.op("aten.linear", x, b.parameter("w.weight", (16, 16)), shape=("B", 16))
    block = b.block(b.op("aten.sum", b.op("custom.strange", y, shape=("B", 16), name="odd"), shape=(), name="loss"))  # type: ignore[arg-type]
    graph = graph_of((block,), ("Only",), ("B", 16), 4, "float32")
    with pytest.raises(UnsupportedOp, match=r"custom\.strange at odd .*register_rule"):
        search(graph, Cluster.parse("local:2"), SearchOptions(strict=True))
    result = found(graph, "local:2", force={"tp": 2})
    assert next(plan for plan in result.candidate.blocks[0].nodes if plan.node == "odd").factors[1] == "redundant"


def test_the_same_search_gives_the_same_plan() -> None:
    first, second = (found(small(), "dgx-h100:1") for _ in range(2))
    assert first.candidate == second.candidate
