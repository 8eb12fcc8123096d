"""Pipelines of experts with context or expert parallelism, as points of the stage search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.oracles.published_rows import row
from support.plans.forced_plans import bundled_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.decoders.graphs import RunOptions, graph_of
from autopar.ir.plan import Precision
from autopar.software import by_hand
from autopar.software.by_hand import seeds_of, with_expert_prices, with_stage_seeds
from autopar.software.choose import Ranking
from autopar.software.configuration import Configuration
from autopar.software.pricer import Pricer
from autopar.software.stage_points import stage_mesh, stage_point, stage_seed
from autopar.solve.fixed.baselines import RECIPES, baselines
from autopar.solve.fixed.candidate import with_seeds
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.validate.architectures import architecture_of

OPTIONS = SearchOptions(batch=16, precision=Precision("bfloat16", "float32"))


@pytest.mark.parametrize(
    ("model", "configuration", "names", "sizes"),
    [
        ("llama-tiny", Configuration(tensor=2, context=2, stages=2), ("dp", "tp", "tp2"), (1, 2, 2)),
        ("mixtral-tiny", Configuration(tensor=2, experts=2, stages=2), ("dp", "ep", "tp"), (1, 2, 2)),
        ("mixtral-tiny", Configuration(experts=2, stages=2, micro=2), ("dp", "ep"), (2, 2)),
    ],
)
def test_a_point_has_the_degrees_of_its_configuration(
    model: str, configuration: Configuration, names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    graph, cluster = bundled_graph(model), Cluster.parse("dgx-h100:1")
    point = stage_point(configuration, graph, cluster)
    assert point is not None
    found = stage_seed(*point, graph, cluster, OPTIONS)
    assert found is not None and found.evaluation.fits
    plan = found.candidate
    assert (plan.mesh.names, plan.mesh.sizes, plan.pipeline.stages) == (names, sizes, configuration.stages)
    assert plan.micro_batches == configuration.micro_batches(16, 8) and plan.mesh.size * configuration.stages == cluster.size
    better = with_seeds(OPTIONS, search(graph, cluster, replace(OPTIONS, time_limit_seconds=5.0)), [found])
    assert better.evaluation.step_seconds <= found.evaluation.step_seconds


def test_what_has_no_mesh_is_no_seed() -> None:
    assert stage_mesh(Configuration(context=2, experts=2), 16) is None
    assert stage_mesh(Configuration(tensor=2, experts=16, stages=2), 16) is None, "eight ranks a stage"
    across = stage_mesh(Configuration(tensor=2, experts=8, stages=2), 16)
    assert across is not None and (across.names, across.sizes) == (("dp", "ep", "tp"), (1, 4, 2)), "eight experts' ranks of four"
    assert stage_point(Configuration(tensor=2, context=2), bundled_graph("llama-tiny"), Cluster.parse("dgx-h100:1")) is None


@pytest.mark.parametrize(("seed_seconds", "seeds"), [(0.0, 0), (1e9, 1)])
def test_what_fits_and_beats_the_plan_is_a_candidate(seed_seconds: float, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama of eight layers with its context cut, where that is what an expert would take."""

    def best(pricer: Pricer, every: object) -> Ranking:
        found = pricer.price(Configuration(tensor=2, context=2, stages=2, zero=1, recompute="everything"))
        return Ranking((found,), 1, 0)

    monkeypatch.setattr(by_hand, "rank", best)
    cluster = Cluster.parse("dgx-h100:1")
    graph = replace(graph_of(architecture_of(row("dg-001", software_stack="x")), 8, "bfloat16", RunOptions()), batch=16)
    recipes = baselines(graph, cluster, OPTIONS, RECIPES[-1:])
    priced_recipes = with_expert_prices(recipes, graph, cluster, OPTIONS)
    (priced,) = with_stage_seeds(priced_recipes, graph, cluster, OPTIONS, seed_seconds)
    assert priced.expert is not None and priced.expert.own is not None and priced.expert.own.fits
    found = seeds_of([priced])
    assert len(found) == seeds and all(each.candidate.mesh.sizes == (1, 2, 2) for each in found)
