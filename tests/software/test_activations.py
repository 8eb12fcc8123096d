"""Activations that recipes do not keep on the device: recomputed modules, and layers whose saved tensors lie in host memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.hardware.cluster import Cluster
from autopar.decoders.recognize import decoder_of
from autopar.errors import AutoparError
from autopar.model_configs import named_configs
from autopar.software.configuration import Configuration
from autopar.software.known.registry import known_software
from autopar.software.models import Model, workload_of
from autopar.software.pricer import PricedConfiguration, Pricer
from autopar.software.record import Job


def pricer(name: str, layers: int, cluster: str = "gb200-nvl72:2") -> Pricer:
    decoder = decoder_of(named_configs()[name], 4096)
    assert decoder is not None
    model = Model(name, 4096, replace(decoder, layers=layers))
    job = Job(devices=8, batch=16, seq=4096, decoder=model.decoder)
    return Pricer(workload_of(known_software()["megatron"], job, model, Cluster.parse(cluster)))


def activations(found: PricedConfiguration) -> float:
    return max(stage.table["activations"] for stage in found.evaluation.stage_memory)


def test_layers_in_host_memory_leave_the_device() -> None:
    """Each layer frees as much, and half of them most of a half of what is saved: the head keeps its own."""
    each, base = pricer("llama3-8b", 16), Configuration(zero=3, micro=1)
    whole, quarter, half = (each.price(replace(base, host_layers=layers)) for layers in (0, 4, 8))
    assert activations(whole) - activations(quarter) == pytest.approx(activations(quarter) - activations(half), rel=0.01)
    assert activations(half) < 0.6 * activations(whole)
    assert half.evaluation.peak_memory_bytes < whole.evaluation.peak_memory_bytes
    assert half.evaluation.step_seconds >= whole.evaluation.step_seconds
    assert half.evaluation.compute_seconds == pytest.approx(whole.evaluation.compute_seconds), "nothing is computed again"


def test_what_a_slow_link_cannot_move_in_time_is_waited_for() -> None:
    base = Configuration(zero=3, micro=1)
    seconds = {}
    for name in ("gb200-nvl72:2", "rtx-4090:1"):
        each = pricer("llama3-8b", 16, name)
        stalls = [each.price(replace(base, host_layers=layers)).evaluation.host_stall_seconds for layers in (0, 15)]
        assert stalls[0] == 0
        seconds[name] = stalls[1]
    assert seconds["rtx-4090:1"] > seconds["gb200-nvl72:2"]


def test_recomputed_modules_are_those_that_are_named() -> None:
    each, base = pricer("deepseek-v3", 6), Configuration(zero=1, micro=1, experts=8)
    words = ((), ("layernorm",), ("mla_up_proj",), ("mla_up_proj", "layernorm"), ("mla_up_proj", "layernorm", "moe_act"))
    sizes = {
        modules: activations(each.price(replace(base, recompute="modules" if modules else "none", modules=modules)))
        for modules in (*words, ("mlp",))
    }
    assert sizes[()] > sizes["mlp",] > sizes["mla_up_proj", "layernorm"]
    assert sizes[()] > sizes["layernorm",] and sizes["mla_up_proj",] > sizes["mla_up_proj", "layernorm"]
    assert sizes["mla_up_proj", "layernorm"] > sizes["mla_up_proj", "layernorm", "moe_act"]


def test_the_mlp_of_layers_with_experts_is_no_dense_one() -> None:
    base = Configuration(zero=1, micro=1)
    dense, mixture = pricer("llama3-8b", 4), pricer("qwen3-30b-a3b", 4)
    again = replace(base, recompute="modules", modules=("mlp",))
    assert activations(dense.price(again)) < 0.75 * activations(dense.price(base))
    assert activations(mixture.price(again)) == activations(mixture.price(base))


def test_megatron_s_rule_of_offload() -> None:
    software, decoder = known_software()["megatron"], decoder_of(named_configs()["llama3-8b"], 4096)
    assert decoder is not None
    job = Job(Configuration(zero=1, host_layers=8), devices=8, batch=8, seq=4096, decoder=decoder)
    assert not software.problems(job, decoder)
    for change in ({"stages": 2}, {"recompute": "everything"}, {"host_layers": 32}):
        wrong = replace(job, configuration=replace(job.configuration, **change))
        assert any("cpu_offloading" in reason for reason, _ in software.problems(wrong, decoder)), change


def test_a_device_without_a_host_offloads_nothing() -> None:
    each = pricer("llama3-8b", 4)
    alone = Pricer(replace(each.work, cluster=replace(each.work.cluster, host=None)))
    with pytest.raises(AutoparError, match="has no host"):
        alone.price(Configuration(zero=3, micro=1, host_layers=2))
