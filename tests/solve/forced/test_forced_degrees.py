"""A forced degree is obeyed: of the FLOPs whose sizes allow it, an axis repeats at most 2 %; or a line says what forbids it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from support.harness.end_to_end import sharding_wins
from support.models.handwritten_blocks import gpt2_graph
from support.models.model_families import families
from support.models.small_models import cases, long_cases, make_case, routed_cases
from support.models.zoo.catalog import specimen
from support.plans.forced_plans import MODEL_AXES, bundled_graph, forced_search, whole_of_able, world_of
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError, Infeasible, PlanError
from autopar.ir.describe import describe
from autopar.ir.graph import Graph
from autopar.solve.ilp.linear_model import Status
from autopar.solve.search import search
from autopar.solve.space.force import parse_force
from autopar.solve.space.options import SearchOptions

TENSOR = ("tp=4", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2")
TWO_AXES = ("tp=2,tp2=2", "dp=2,tp=2,tp2=2", "pp=2,tp=2,tp2=2", "pp=2,dp=2,tp=2,tp2=2")
EXPERTS = ("ep=4", "dp=2,ep=2", "pp=2,ep=2", "pp=2,dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2,tp=2")
BUNDLED = (
    "mlp",
    "convnet",
    "gpt2-tiny",
    "llama-tiny",
    "mixtral-tiny",
    "qwen3-tiny",
    "bert-tiny",
    "vit-tiny",
    "gpt2",
    "bert-large",
)
SMALL = (
    "gpt2", "llama", "bert", "encoder_decoder", "convnet", "convnet_bn", "routed", "mixtral", "qwen3_moe", "deepseek_v3",
    "gpt_oss", "t5", "modernbert", "convnext", "mamba2", "dit", "unet", "clip",
)  # fmt: skip


def small_graph(name: str) -> Graph:
    model, batch = make_case((families() | cases() | long_cases() | routed_cases())[name], torch.float32, 16)
    return capture(model, (), batch)


def obeys(graph: Graph, force: str) -> str:
    """Empty, or the line that refuses the force; fails where the plan does not obey it."""
    degrees = parse_force(force).degrees
    try:
        found = forced_search(graph, force)
    except AutoparError as error:
        assert "\n" not in str(error), f"{force}: {error}"
        return str(error)
    for axis in MODEL_AXES:
        if degrees.get(axis, 1) > 1:
            assert found.candidate.mesh.size_of(axis) == degrees[axis], force
            assert whole_of_able(found, axis) <= 0.02, f"{force}: {describe(found.graph, found.candidate)}"
            assert f"{axis}={degrees[axis]} (nothing sharded)" not in describe(found.graph, found.candidate)
    assert found.candidate.pipeline.stages == degrees.get("pp", 1)
    return ""


@pytest.mark.parametrize(
    ("name", "forces"),
    [
        ("mlp", ("pp=2,tp=2", "pp=2,dp=2,tp=2", "tp=2,tp2=2", "pp=2,tp=2,tp2=2", "ep=2")),
        ("gpt2-tiny", ("pp=2,dp=2,tp=2",)),
        ("convnet", ("dp=2,tp=2",)),
    ],
)
def test_bundled_models(name: str, forces: tuple[str, ...]) -> None:
    graph = bundled_graph(name)
    assert not any(obeys(graph, force) for force in forces)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUNDLED)
def test_every_bundled_model(name: str) -> None:
    graph = bundled_graph(name)
    refused = {force: said for force in (*TENSOR, *TWO_AXES, *EXPERTS) if (said := obeys(graph, force))}
    assert all(any(word in said for word in ("beside experts", "micro-batches", "multiply")) for said in refused.values()), (
        refused
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_small_model(name: str) -> None:
    graph = small_graph(name)
    refused = {force: said for force in (*TENSOR, *TWO_AXES, *EXPERTS) if (said := obeys(graph, force))}
    assert all(any(word in said for word in ("beside experts", "micro-batches", "multiply")) for said in refused.values()), (
        refused
    )


class Odd(nn.Module):
    """Layers of which some have sizes that two and three do not divide."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def odd(*widths: int) -> Graph:
    return capture(Odd(*widths), (torch.randn(16, widths[0]), torch.randn(16, widths[-1])))


@pytest.mark.parametrize("force", ["tp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2"])
def test_sizes_that_forbid_an_axis_are_named(force: str) -> None:
    with pytest.raises(PlanError) as caught:
        forced_search(odd(35, 77, 55, 7), force)
    said = str(caught.value)
    assert said.startswith(f"{force.rsplit(',', 1)[-1]} can shard none of the FLOPs: it divides no size of aten.linear ")
    assert " x [77, 35] at layers.0" in said and "test_forced_degrees.py" not in said.split(" at ")[0] and "\n" not in said


def test_a_part_that_sizes_forbid_is_told_and_the_rest_is_sharded() -> None:
    graph = odd(35, 55, 128, 128)
    with pytest.warns(
        UserWarning, match=r"tp=2 computes 5\.\d % of the FLOPs .* it divides no size of aten.linear .* x \[55, 35\] at"
    ):
        found = forced_search(graph, "tp=2")
    assert whole_of_able(found, "tp") == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forced_search(graph, "dp=2")


def test_an_operation_that_two_axes_cannot_share_is_sharded_over_one() -> None:
    """[16, 6] x [14, 6]: two divides each size, four none, so that each axis takes one of the operation's dimensions."""
    found = forced_search(odd(6, 14, 6, 2), "tp=2,tp2=2")
    assert all(whole_of_able(found, axis) <= 0.02 for axis in ("tp", "tp2"))


def test_small_operations_on_slow_links_are_sharded_too() -> None:
    """Each costs more to shard than to repeat, whatever a repeated FLOP is priced at; together they are 3 % of all."""
    model, batch = specimen("tab_transformer")
    graph = capture(model, (), batch)
    found = forced_search(graph, "dp=2,tp=2", dtype="float64")
    assert whole_of_able(found, "tp") <= 0.02


def test_unforced_degrees_may_repeat_work() -> None:
    """The limit is for what is forced: a free axis that does not pay is not taken."""
    found = forced_search(odd(32, 32, 32, 32), "dp=1", cluster=sharding_wins(1))
    assert found.candidate.mesh.size == 1


def small_pipeline(layers: int = 4) -> Graph:
    return gpt2_graph(layers=layers, hidden=64, heads=4, vocabulary=128, seq=32, batch=16)


@pytest.mark.parametrize(
    ("force", "name", "virtual", "least"),
    [
        ("pp=2,schedule=dualpipev", "dualpipev", 2, 4),
        ("pp=4,schedule=dualpipev", "dualpipev", 2, 8),
        ("pp=2,schedule=interleaved", "1f1b", 2, 2),
        ("pp=2,schedule=interleaved,virtual=3", "1f1b", 3, 2),
        ("pp=2,dp=2,tp=2,schedule=zbv", "zbv", 2, 2),
    ],
)
def test_a_forced_schedule_has_the_micro_batches_that_it_needs(force: str, name: str, virtual: int, least: int) -> None:
    found = forced_search(small_pipeline(), force).candidate
    pipeline = found.pipeline
    assert (pipeline.schedule, found.micro_batches >= least) == (name, True) and pipeline.virtual >= virtual


def test_a_forced_schedule_that_cannot_be_is_a_line() -> None:
    for force, said in (
        ("pp=4,dp=4,schedule=dualpipev", "at least 8 micro-batches on 4 stages, not 4: enlarge the batch"),
        ("pp=2,schedule=interleaved,virtual=1", "several chunks a stage: write virtual=2"),
        ("schedule=zbv", "schedule=zbv needs a pipeline"),
    ):
        with pytest.raises(AutoparError, match=said):
            forced_search(small_pipeline(), force)


def test_headlines_say_what_was_chosen() -> None:
    found = forced_search(small_pipeline(), "pp=2,dp=4,zero=3,zero_group=2,schedule=interleaved,virtual=2")
    said = describe(found.graph, found.candidate)
    micro = found.candidate.micro_batches
    assert said.startswith(f"pp=2 (interleaved 1f1b, 2 chunks) x dp=4 (ZeRO-3 in groups of 2), {micro} micro-batches")
    convolutions = forced_search(bundled_graph("convnet"), "dp=2,tp=2")
    assert "convolutions by output channels" in describe(convolutions.graph, convolutions.candidate)


def test_a_forced_pipeline_that_does_not_fit_is_explained() -> None:
    """The shortage of a priced plan, and memory in which it fits."""
    graph = gpt2_graph(layers=4, hidden=256, heads=4, vocabulary=512, seq=128, batch=64)
    whole = Cluster.parse("local:4")
    tight = replace(whole, device=replace(whole.device, memory_bytes=whole.device.base_bytes + 2**22))
    with pytest.raises(Infeasible) as caught:
        forced_search(graph, "pp=2,dp=2", cluster=tight)
    first, *others = str(caught.value).splitlines()
    assert "the plan that takes least memory, pp=2 (1f1b) x dp=2" in first and "is short of" in first and others
    need = int(others[-1].split("devices of ")[1].split(" MiB")[0])
    roomy = replace(tight, device=replace(tight.device, memory_bytes=need * 2**20))
    assert forced_search(graph, "pp=2,dp=2", cluster=roomy).evaluation.fits


@pytest.mark.parametrize(
    ("force", "said"),
    [("pp=2,dp=2,ep=2", "dp=2 x ep=2"), pytest.param("pp=2,tp=2,tp2=2", "dp=1 x tp=2 x tp2=2", marks=pytest.mark.slow)],
)
def test_a_forced_pipeline_with_experts_or_two_axes_that_does_not_fit_is_explained(force: str, said: str) -> None:
    """As precisely as one with a tensor axis: what is short and where, and the memory in which the same plan fits."""
    graph = gpt2_graph(layers=4, hidden=256, heads=4, vocabulary=512, seq=128, batch=64)
    whole = Cluster.parse(f"local:{world_of(force)}")
    tight = replace(whole, device=replace(whole.device, memory_bytes=whole.device.base_bytes + 2**22))
    with pytest.raises(Infeasible) as caught:
        forced_search(graph, force, cluster=tight)
    first, *others = str(caught.value).splitlines()
    assert "the plan that takes least memory, pp=2 (" in first and f"x {said}, " in first and "is short of" in first
    need = int(others[-1].split("devices of ")[1].split(" MiB")[0])
    roomy = replace(tight, device=replace(tight.device, memory_bytes=need * 2**20))
    assert forced_search(graph, force, cluster=roomy).evaluation.fits


def test_where_time_is_short_one_sharding_obeys_too() -> None:
    options = SearchOptions(batch=16, force={"pp": 1, "dp": 2, "tp": 2, "tp2": 2}, time_limit_seconds=0.0)
    found = search(small_pipeline(), Cluster.parse("local:8"), options)
    assert found.status is Status.FEASIBLE and all(whole_of_able(found, axis) <= 0.02 for axis in ("tp", "tp2"))


def test_the_world_is_what_degrees_multiply_to() -> None:
    assert world_of("pp=2,dp=2,tp=2,zero=3,schedule=zbv") == 8
