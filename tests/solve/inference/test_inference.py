"""Plans for inference: the best of their meshes, with one set of weights for both graphs, and without anything of training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import autopar
from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.capture.tracing.decode import capture_decode, inference
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph
from autopar.ir.placement import Replicate, Shard
from autopar.ir.plan import Precision
from autopar.plan_inputs import registry
from autopar.solve.inference import InferenceResult, search_inference, stored_placements
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.space.options import SearchOptions
from autopar.variants.planner import plan_variant

CLUSTER = "dgx-h100:1"
TOKENS = 24


def decoder(name: str = "llama-tiny", batch: int = 8) -> tuple[Any, dict[str, torch.Tensor]]:
    loaded = load_model(name, batch, 32, "bfloat16")
    assert isinstance(loaded.example_inputs, dict)
    return loaded.model, {"input_ids": loaded.example_inputs["input_ids"]}


@pytest.fixture(scope="module")
def graphs() -> tuple[Graph, Graph]:
    """The prefill, and one token of decoding."""
    model, prompt = decoder()
    with inference(model):
        prefill = capture(model, (), prompt, compute_dtype="bfloat16")
        return prefill, capture_decode(model, prompt, TOKENS, compute_dtype="bfloat16")


def searched(graphs: tuple[Graph, Graph], **force: int) -> InferenceResult:
    options = SearchOptions(batch=8, precision=Precision("bfloat16", "bfloat16"), force=force)
    return search_inference(*graphs, Cluster.parse(CLUSTER), options, TOKENS)


@pytest.fixture(scope="module")
def results(graphs: tuple[Graph, Graph]) -> dict[int, InferenceResult]:
    """The chosen one (0), that of each degree of tensor parallelism, which then has to shard what it can, and of a data
    degree."""
    return {0: searched(graphs)} | {degree: searched(graphs, tp=degree) for degree in (1, 8)} | {-4: searched(graphs, dp=4)}


def test_the_best_mesh_is_chosen(results: dict[int, InferenceResult]) -> None:
    """No worse than any forced degrees, by the seconds that the user asks for, above a bound that holds for each."""
    best = results[0]
    assert best.decode is not None
    seconds = best.prefill.evaluation.step_seconds + (TOKENS - 1) * best.decode.evaluation.step_seconds
    assert best.seconds == pytest.approx(seconds)
    assert best.tokens_per_second == pytest.approx(8 * TOKENS / best.seconds)
    assert best.seconds <= min(results[degree].seconds for degree in (1, 8, -4)) * 1.001
    assert all(best.bound_seconds <= each.seconds and each.bound_seconds <= each.seconds for each in results.values())


def test_nothing_of_training(results: dict[int, InferenceResult]) -> None:
    for each in results.values():
        assert each.decode is not None
        for result in (each.prefill, each.decode):
            memory = dict(result.evaluation.memory)
            assert memory["optimizer"] == memory["gradients"] == memory["activations"] == 0
            assert result.graph.forward_only


@pytest.mark.parametrize("degree", [0, 1, -4])
def test_decoding_is_priced_as_it_will_run(graphs: tuple[Graph, Graph], results: dict[int, InferenceResult], degree: int) -> None:
    """The program that `generate` makes of the same weights, with the cache as it hands it over, takes the seconds that were
    promised (to half of what the models resolve); the cache is divided over devices by heads and by examples."""
    (prefill, graph), result, cluster = graphs, results[degree], Cluster.parse(CLUSTER)
    plan = plan_of_result(prefill, cluster, result.plan_result, (), optimizer="sgd")
    tp = plan.candidate.mesh.size_of("tp")
    heads = Shard(1) if tp == 2 else Replicate()
    assert graph.interface is not None and result.decode is not None
    names = [each.input for each in graph.interface.arguments if ".keys." in each.path or ".values." in each.path]
    names += [each.value for each in graph.outputs if each.path.startswith("past_key_values")]
    placed = {name: {"tp": heads} if tp > 1 else {} for name in names}
    found, candidate = plan_variant(graph, plan, cluster, registry(), placed)
    seconds = evaluate(found, candidate, cluster, "sgd").step_seconds
    assert seconds == pytest.approx(result.decode.evaluation.step_seconds, rel=1e-2)
    assert stored_placements(found, candidate) == stored_placements(plan.graph, plan.candidate)
    whole = 2 * 2 * 2 * 16 * 64 * 2 * 8  # keys and values of 2 layers, 2 heads of 16, 64 positions, bfloat16, 8 examples
    assert result.cache_bytes == whole // (plan.candidate.mesh.size_of("dp") * (2 if tp == 2 else 1))


def test_throughput_takes_a_larger_batch(graphs: tuple[Graph, Graph], results: dict[int, InferenceResult]) -> None:
    """Until the memory is full: of devices that have 10 MB beside what the process takes."""
    cluster = Cluster.parse(CLUSTER)
    base = dict(results[1].prefill.evaluation.memory)["base"]
    device = replace(cluster.device, memory_bytes=int((base + 1e7) / (1 - cluster.device.memory_margin)))
    options = SearchOptions(batch=8, precision=Precision("bfloat16", "bfloat16"), force={"tp": 1})
    larger = search_inference(*graphs, replace(cluster, device=device), options, TOKENS, throughput=True)
    batch, peak = larger.prefill.candidate.batch, larger.prefill.evaluation.peak_memory_bytes
    assert batch > 8 and batch & (batch - 1) == 0
    assert larger.tokens_per_second > 1.02 * results[1].tokens_per_second
    assert 0 < base + 1e7 - peak - larger.cache_bytes < 1e7


@pytest.mark.slow
def test_plan_and_model(results: dict[int, InferenceResult]) -> None:
    """The plan says what was searched, and comes back from its file; the model is as it was before."""
    model, prompt = decoder()
    model.train()
    model.lm_head.weight.requires_grad_(False)
    plan = autopar.plan(model, CLUSTER, prompt, mode="inference", new_tokens=TOKENS)
    info = plan.document.inference
    assert info is not None and info.latency_seconds == pytest.approx(results[0].seconds)
    assert autopar.Plan.from_json(plan.to_json()).document.inference == info
    assert all(module.training for module in model.modules())
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["lm_head.weight"]


def test_a_forward_alone() -> None:
    """Of any model; its weights are stored in the dtype that computes."""
    loaded = load_model("mlp", 16)
    plan = autopar.plan(loaded.model, CLUSTER, loaded.example_inputs, mode="inference", precision="bf16")
    info = plan.document.inference
    assert info is not None and info.decode_seconds is None and info.latency_seconds == plan.document.predicted.step_seconds
    assert plan.candidate.precision.master == "bfloat16"
    trained = autopar.plan(loaded.model, CLUSTER, loaded.example_inputs, precision="bf16")
    assert plan.document.predicted.step_seconds < trained.document.predicted.step_seconds  # type: ignore[operator]


@pytest.mark.parametrize(("options", "words"), [
    ({"force": "pp=2"}, "no pipeline"),
    ({"new_tokens": 1000}, "positions for 64"),
    ({"new_tokens": -1}, "is no number of tokens"),
    ({"objective": "speed"}, "is no objective"),
    ({"mode": "training"}, 'write mode="inference" too'),
    ({"mode": "serving"}, "is no mode"),
])  # fmt: skip
def test_refusals(options: dict[str, Any], words: str) -> None:
    model, prompt = decoder()
    with pytest.raises(AutoparError, match=words) as raised:
        autopar.plan(model, CLUSTER, prompt, **{"mode": "inference", "new_tokens": TOKENS, **options})
    assert "\n" not in str(raised.value)


def test_other_models_decode_nothing() -> None:
    loaded = load_model("mlp", 16)
    with pytest.raises(CaptureError, match="Mlp is none"):
        autopar.plan(loaded.model, CLUSTER, loaded.example_inputs, mode="inference", new_tokens=4)


@pytest.mark.slow
def test_large_weights_are_read_by_all_devices() -> None:
    """Decoding few sequences with an 8B model is reading its weights: each device reads its part."""
    loaded = load_model("llama3-8b", 8, 2048, "bfloat16")
    assert isinstance(loaded.example_inputs, dict)
    prompt = {"input_ids": loaded.example_inputs["input_ids"]}
    plan = autopar.plan(loaded.model, CLUSTER, prompt, mode="inference", new_tokens=TOKENS)
    info = plan.document.inference
    assert plan.candidate.mesh.size_of("tp") == 8 and info is not None
    assert info.latency_bound_seconds >= 0.95 * info.latency_seconds
