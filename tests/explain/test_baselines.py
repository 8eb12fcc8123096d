"""Baselines are forced configurations with the evaluator's price; the search is never slower than one that it could choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import llama_graph
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import BatchError
from autopar.ir.graph import Graph
from autopar.solve.fixed.baselines import RECIPES, PricedRecipe, baselines
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def shrunk(cluster: Cluster, gib: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=int(gib * 2**30)))


def priced(graph: Graph, cluster: Cluster) -> dict[str, PricedRecipe]:
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
        assert each.configuration is not None and each.evaluation is not None
        again = evaluate(llama, fixed_candidate(llama, cluster, each.configuration), cluster)
        assert again.step_seconds == pytest.approx(each.evaluation.step_seconds, rel=1e-12)
        assert again.peak_memory_bytes == each.evaluation.peak_memory_bytes
    assert (found["ddp"].configuration.tp, found["ddp"].configuration.zero) == (1, 0)  # type: ignore[union-attr]
    assert (found["fsdp"].configuration.tp, found["fsdp"].configuration.zero) == (1, 3)  # type: ignore[union-attr]
    wide = found["fsdp_tp"].configuration
    assert wide is not None and wide.tp in (4, 8) and wide.sequence_parallel and wide.zero == 3
    megatron = found["megatron"].configuration
    assert megatron is not None and (megatron.tp, megatron.pp, megatron.zero) == (wide.tp, 1, 1)


def test_within_a_recipe_the_fastest_variant_that_fits(llama: Graph) -> None:
    """By trying all of them: so it recomputes only where it must."""
    cluster = Cluster.parse("dgx-h100:1")
    loose = priced(llama, cluster)["fsdp"]
    tight = shrunk(cluster, 0.8 * loose.evaluation.peak_memory_bytes / 2**30)  # type: ignore[union-attr]
    found = priced(llama, tight)["fsdp"]
    every = [
        evaluate(llama, fixed_candidate(llama, tight, FixedConfiguration(zero=3, micro_batches=count, recompute=again)), tight)
        for count in (1, 2, 4)
        for again in ("none", "full")
    ]
    best = min(each.step_seconds for each in every if each.fits)
    assert found.evaluation is not None and found.fits and found.evaluation.step_seconds == best > loose.evaluation.step_seconds  # type: ignore[union-attr]


def test_what_does_not_fit_says_by_how_much_and_a_recipe_lengthens_its_pipeline(llama: Graph) -> None:
    cluster = Cluster.parse("dgx-h100:2")
    one = priced(llama, cluster)["megatron"]
    assert one.evaluation is not None and one.short_bytes == 0
    recipe = FixedConfiguration(tp=8, sequence_parallel=True, zero=1, recompute="everything")
    smallest = [replace(recipe, pp=pp, micro_batches=16 * pp) for pp in (1, 2)]
    peaks = [evaluate(llama, fixed_candidate(llama, cluster, each), cluster).peak_memory_bytes / 2**30 for each in smallest]
    assert peaks[1] < peaks[0]
    found = priced(llama, shrunk(cluster, sum(peaks) / 2))
    assert not found["ddp"].fits and found["ddp"].short_bytes > 0
    piped = found["megatron"]
    assert piped.configuration is not None and piped.configuration.pp > 1 and piped.fits
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
            assert chosen <= each.evaluation.step_seconds * (1 + SearchOptions().min_improvement), each.description


def test_recipes_leave_out_of_recomputation_what_reads_updated_statistics() -> None:
    """Batch norm in repeated layers: Megatron's recipe is priced, or its reason is one of the recipe."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.Linear(1024, 256)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.norm(self.up(x)).relu())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    graph = capture(Net(), (torch.randn(64, 256),))
    for cluster in (Cluster.parse("dgx-h100:8"), shrunk(Cluster.parse("dgx-h100:8"), 0.01)):
        for each in priced(graph, cluster).values():
            assert "not saved" not in each.problem, each.problem
