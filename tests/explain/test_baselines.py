"""Baselines are forced configurations with the evaluator's price; the search is never slower than one that it could choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.blocks import gpt2_graph
from support.solving import llama_graph

from autopar.cost_models.evaluate import evaluate
from autopar.cost_models.hardware import Cluster
from autopar.errors import BatchError
from autopar.ir.graph import Graph
from autopar.solve.baselines import RECIPES, Priced, baselines
from autopar.solve.forced import Forced, forced
from autopar.solve.options import SearchOptions
from autopar.solve.search import search


def shrunk(cluster: Cluster, gib: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(gib * 2**30)))


def priced(graph: Graph, cluster: Cluster) -> dict[str, Priced]:
    found = {each.recipe.key: each for each in baselines(graph, cluster, SearchOptions())}
    assert list(found) == [recipe.key for recipe in RECIPES]
    return found


@pytest.fixture(scope="module")
def llama() -> Graph:
    return llama_graph(layers=4, batch=32, seq=512, hidden=1024, heads=8, kv_heads=4)


def test_each_is_the_evaluator_on_the_forced_candidate(llama: Graph) -> None:
    cluster = Cluster.parse("dgx-h100:2")
    found = priced(llama, cluster)
    for each in found.values():
        assert each.wanted is not None and each.evaluation is not None
        again = evaluate(llama, forced(llama, cluster, each.wanted), cluster)
        assert again.step_seconds == pytest.approx(each.evaluation.step_seconds, rel=1e-12)
        assert again.peak_memory_bytes == each.evaluation.peak_memory_bytes
    assert (found["ddp"].wanted.tp, found["ddp"].wanted.zero) == (1, 0)  # type: ignore[union-attr]
    assert (found["fsdp"].wanted.tp, found["fsdp"].wanted.zero) == (1, 3)  # type: ignore[union-attr]
    wide = found["fsdp_tp"].wanted
    assert wide is not None and wide.tp in (4, 8) and wide.sequence_parallel and wide.zero == 3
    megatron = found["megatron"].wanted
    assert megatron is not None and (megatron.tp, megatron.pp, megatron.zero) == (wide.tp, 1, 1)


def test_within_a_recipe_the_fastest_variant_that_fits(llama: Graph) -> None:
    """By trying all of them: so it recomputes only where it must."""
    cluster = Cluster.parse("dgx-h100:1")
    loose = priced(llama, cluster)["fsdp"]
    tight = shrunk(cluster, 0.8 * loose.evaluation.peak_memory_bytes / 2**30)  # type: ignore[union-attr]
    found = priced(llama, tight)["fsdp"]
    every = [
        evaluate(llama, forced(llama, tight, Forced(zero=3, micro_batches=count, recompute=again)), tight)
        for count in (1, 2, 4)
        for again in ("none", "full")
    ]
    best = min(each.step_seconds for each in every if each.fits)
    assert found.evaluation is not None and found.fits and found.evaluation.step_seconds == best > loose.evaluation.step_seconds  # type: ignore[union-attr]


def test_what_does_not_fit_says_by_how_much_and_a_recipe_lengthens_its_pipeline(llama: Graph) -> None:
    cluster = Cluster.parse("dgx-h100:2")
    one = priced(llama, cluster)["megatron"]
    assert one.evaluation is not None and one.short_bytes == 0
    recipe = Forced(tp=8, sequence_parallel=True, zero=1, recompute="everything")
    smallest = [replace(recipe, pp=pp, micro_batches=16 * pp) for pp in (1, 2)]
    peaks = [evaluate(llama, forced(llama, cluster, each), cluster).peak_memory_bytes / 2**30 for each in smallest]
    assert peaks[1] < peaks[0]
    found = priced(llama, shrunk(cluster, sum(peaks) / 2))
    assert not found["ddp"].fits and found["ddp"].short_bytes > 0
    piped = found["megatron"]
    assert piped.wanted is not None and piped.wanted.pp > 1 and piped.fits
    hopeless = priced(llama, shrunk(cluster, 0.001))
    for each in hopeless.values():
        assert each.evaluation is not None and not each.fits
        assert each.short_bytes == each.evaluation.peak_memory_bytes - each.evaluation.memory_capacity_bytes


def test_where_the_batch_is_too_small_for_the_data_ranks(llama: Graph) -> None:
    found = priced(replace(llama, batch=4), Cluster.parse("dgx-h100:1"))
    assert found["ddp"].evaluation is None and "does not divide by 8 data ranks" in found["ddp"].problem
    assert found["fsdp_tp"].fits


@pytest.mark.parametrize("cluster", ["local:4", "dgx-h100:1", "dgx-a100:2"])
def test_the_search_is_never_slower(cluster: str) -> None:
    graph, on = gpt2_graph(layers=2, batch=16), Cluster.parse(cluster)
    try:
        chosen = search(graph, on, SearchOptions()).evaluation.step_seconds
    except BatchError:
        pytest.skip("no data degree")
    for each in baselines(graph, on, SearchOptions()):
        if each.fits:
            assert each.evaluation is not None
            assert chosen <= each.evaluation.step_seconds * (1 + SearchOptions().worth), each.words
