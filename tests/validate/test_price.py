"""From a row to a candidate and its price."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.oracles.published_rows import row, session, table

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.mesh_links import links_of_axis
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.cost_models.hardware.stack_entries import state_layouts
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.state.state_cost import state_cost
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.state.state_memory import StatePolicy
from autopar.cost_models.step.evaluate import evaluate
from autopar.decoders.graphs import RECOMPUTED, RunOptions, captured, graph_of
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Precision
from autopar.validate.architectures import NotExpressed, architecture_of
from autopar.validate.configuration import cluster_of, configuration_of, layer_share, recompute_of, workload_of
from autopar.validate.price import price_rows
from autopar.validate.report import predicted_bytes, report
from autopar.validate.rows import Row


def test_configuration_by_hand() -> None:
    """176B on 384 A100: 12 stages of 8 tensor ranks leave 4 data ranks; 2048 sequences are 4 x 128 micro-batches of 4."""
    each = row("bloom-020", global_batch=2048, micro_batch=4, n_gpus=384, tp=8, pp=12)
    wanted = configuration_of(each).fixed(workload_of(each))
    assert (wanted.tp, wanted.pp, wanted.micro_batches, wanted.zero) == (8, 12, 128, 1)
    assert wanted.precision.compute == "float16" and wanted.precision.master == "float32"
    assert wanted.recompute == "everything", "Megatron runs a layer from end to end again"
    assert not wanted.sequence_parallel
    cluster = cluster_of(row("bloom-020"))
    assert (cluster.size, cluster.device.name) == (384, cluster_of(row("bloom-063")).device.name)


@pytest.mark.parametrize(("gpu", "preset"), [("GB200", "gb200-nvl72"), ("GB300", "gb300-nvl72"), ("B200", "dgx-b200")])
@pytest.mark.parametrize("devices", [8, 64, 256])
def test_a_rows_cluster_is_the_planners(gpu: str, preset: str, devices: int) -> None:
    """A rack's NVLink joins 64 of 256 devices, not the four of a tray: experts over 32 ranks exchange tokens inside it."""
    ours = cluster_of(row("mb-022", gpu=gpu, n_gpus=devices))
    planned = Cluster.parse(f"{preset}:{devices // Cluster.parse(preset).size}")
    assert (ours.links, ours.size, ours.device) == (planned.links, planned.size, planned.device)


def test_state_groups() -> None:
    """HSDP without a number is one node; a group as large as all data ranks is none."""
    plain = {"n_gpus": 32, "tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, "global_batch": 32}
    assert configuration_of(row("fms-001", zero_stage_or_fsdp="hsdp", **plain)).group == 8
    assert configuration_of(row("fms-001", zero_stage_or_fsdp="hsdp", zero_group_size=16, **plain)).group == 16
    assert configuration_of(row("fms-001", zero_stage_or_fsdp="zero3", zero_group_size=32, **plain)).group == 0


def test_networks_and_variants() -> None:
    fast, slow = cluster_of(row("lf-001", nic_gbit_per_device=400.0)), cluster_of(row("lf-001", nic_gbit_per_device=200.0))
    rates = [each.links[-1].bandwidth_bytes_per_second for each in (fast, slow)]
    assert rates[0] == pytest.approx(2 * rates[1])
    part = cluster_of(row("tt-001")).device
    assert part.bandwidth_bytes_per_second == 2.4e12 and part.memory_bytes == int(94.5 * 2**30)


def test_recomputation_in_words_of_the_planner() -> None:
    assert recompute_of(row("lf-001", act_ckpt="full")) == "full"
    assert recompute_of(row("lf-001", act_ckpt="")) == "none"
    assert recompute_of(row("tt-001")) == "products"
    per_layer = row("fms-001", act_ckpt="selective", notes="HFU=50", metric_mfu_pct=45.0)
    assert layer_share(per_layer) == pytest.approx(1 / 3)  # 3 x (50 / 45 - 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "TPU v5p"}, "no cluster for TPU v5p"),
        ({"gpu": ""}, "unnamed device"),
        ({"device_variant": "odd"}, "no device odd"),
        ({"micro_batch": None}, "micro_batch is not stated"),
        ({"heads": None}, "heads is not stated"),
        ({"heads": 7, "kv_heads": 7, "head_dim": None}, "7 heads do not divide"),
        ({"zero_stage_or_fsdp": ""}, "state sharding is not stated"),
        ({"precision": "int4"}, "precision int4"),
        ({"tp": 3}, "does not divide"),
        ({"pp": 4096}, "does not divide"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"act_ckpt": "magic"}, "recomputation magic"),
        ({"layers": 1, "pp": 8, "n_gpus": 8}, "fewer stages"),
        ({"heads": 32, "head_dim": 128, "kv_heads": 5}, "5 key-value heads do not divide 32"),
        ({"n_experts": 4, "top_k": 8}, "top_k=8 of 4 experts"),
        ({"n_experts": 6, "top_k": 2, "ep": 4}, "ep=4 does not divide 6 experts"),
        ({"vocab": 0}, "vocab is 0"),
    ],
)
def test_what_cannot_be_expressed_is_listed_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    (priced,) = price_rows([row("lf-001", id="changed", **changes)], session=session())
    assert priced.evaluation is None and reason in priced.skipped
    assert "\n" not in priced.skipped
    (line,) = report([priced]).document()["rows"]
    assert line["skipped"] == priced.skipped and line["predicted_step_seconds"] is None


def test_devices_without_a_size_and_new_nodes() -> None:
    """An A100 of unknown memory is the one of 80 GB, and the report says so; GB200 and B300 are known."""
    stated, plain, gb200, b300 = price_rows(
        [row("lf-001", id=gpu, gpu=gpu) for gpu in ("A100-80GB", "A100", "GB200", "B300")], session=session()
    )
    assert plain.evaluation is not None and stated.evaluation is not None
    assert plain.evaluation.step_seconds == stated.evaluation.step_seconds
    assert "80 GB of memory" in plain.assumed and "80 GB of memory" not in stated.assumed
    for each in (gb200, b300):
        assert each.evaluation is not None and each.evaluation.step_seconds < plain.evaluation.step_seconds


def test_facts_of_the_software() -> None:
    """The bytes of gradients that are reduced: two with NeMo, four with DeepSpeed in bfloat16 (two in float16) and with
    Megatron; each parameter by itself in DeepSpeed's ZeRO-3 of 2021."""
    adamw, layouts = optimizer_named("adamw"), state_layouts()
    half, bfloat = (Precision(name, "float32") for name in ("float16", "bfloat16"))
    assert StatePolicy.of(bfloat, adamw, layouts["nemo-megatron-core"]).gradient_bytes == 2
    assert StatePolicy.of(bfloat, adamw, layouts["megatron-core"]).gradient_bytes == 4
    assert StatePolicy.of(bfloat, adamw, layouts["megatron-deepspeed"]).gradient_bytes == 4
    assert StatePolicy.of(half, adamw, layouts["megatron-deepspeed"]).gradient_bytes == 2
    group, device = StateGroup(8e6, 8e6, 10, small=6), Cluster.parse("dgx-a100").device
    link = links_of_axis(Cluster.parse("dgx-a100:8"), Mesh((Axis("dp", 64),)), 0)
    old = StatePolicy.of(half, adamw, layouts["deepspeed-zero3-2021"])
    alone = state_cost(group, 3, link, device, half, adamw, old)
    quarter = state_cost(StateGroup(2e6, 2e6, 1), 3, link, device, half, adamw, old)
    assert alone.gather_forward_seconds == pytest.approx(4 * quarter.gather_forward_seconds)
    assert alone.reduce_seconds == pytest.approx(4 * quarter.reduce_seconds)
    together = state_cost(group, 3, link, device, half, adamw, StatePolicy.of(half, adamw, layouts["megatron-deepspeed"]))
    assert together.gather_forward_seconds < alone.gather_forward_seconds


def test_unknown_models_and_stacks_are_priced() -> None:
    """Nothing depends on a name that the table happens to have."""
    known, strange = price_rows(
        [row("lf-001"), row("lf-001", id="x", source="elsewhere", model_family="Nobody-7B")], session=session()
    )
    assert known.evaluation is not None and strange.evaluation is not None
    assert strange.evaluation.step_seconds == known.evaluation.step_seconds, "never a constant per row, source or model"
    (other,) = price_rows([row("tt-001", software_stack="unheard-of")], session=session())
    assert other.evaluation is not None and other.evaluation.step_seconds > 0


@pytest.mark.parametrize("name", ["lf-001", "bloom-020", "mlm-002", "tt-004", "fms-001"])
def test_price_is_the_evaluators(name: str) -> None:
    """The session's candidate on the session's cluster through the planner's evaluator, to the last digit; within a factor
    of what was measured."""
    one = table()[name]
    setting = session().setup(one)
    cluster = with_stack(setting.cluster, one.software_stack, compiled=one.compiled == 1)
    alone = evaluate(setting.graph, setting.candidate, cluster, "adamw")
    (priced,) = session().price([one])
    assert priced.evaluation is not None and priced.evaluation.step_seconds == alone.step_seconds
    assert setting.candidate.devices == one.n_gpus
    assert one.step_seconds is not None and 0.6 < priced.evaluation.step_seconds / one.step_seconds < 1.6


def test_allocated_memory_is_met_without_slack() -> None:
    """Three published peaks of the allocator, one of them of 8 interleaved chunks."""
    for priced in session().price([table()[name] for name in ("mlm-001", "mlm-002", "mlm-003")]):
        assert priced.evaluation is not None
        assert predicted_bytes(priced.row, priced.evaluation) == pytest.approx(priced.row.measured_memory_bytes, rel=0.05)


@pytest.mark.parametrize("name", ["lf-001", "mlm-001", "bloom-020"])
def test_sized_and_deepened_graph_is_the_captured_one(name: str) -> None:
    """A graph that was traced at marking sizes, four layers deep, equals the trace of the model itself."""
    architecture = architecture_of(table()[name])
    graph, plain = graph_of(architecture, 6, "bfloat16", RunOptions()), captured(architecture, 6, "bfloat16")
    if architecture.loss_in_place:
        assert [str(call) for call in graph.calls] == [str(call) for call in plain.calls]
        assert [str(b).replace("_in_place", "_sum") for b in graph.blocks] == [str(b) for b in plain.blocks]
    else:
        assert (graph.blocks, graph.calls, graph.inputs) == (plain.blocks, plain.calls, plain.inputs)


def test_marked_layers_are_spread_evenly() -> None:
    setting = session().setup(row("fms-001", act_ckpt="selective", notes="", layers=32, id="half"))
    marked = [index for index, call in enumerate(setting.graph.calls) if call.block.endswith(RECOMPUTED)]
    assert len(marked) == 16 and {after - before for before, after in zip(marked, marked[1:], strict=False)} == {2}
    plans = {plan.block: plan for plan in setting.candidate.blocks}
    for name, plan in plans.items():
        assert (plan.recompute or bool(plan.recompute_nodes)) == name.endswith(RECOMPUTED)


def test_latent_attention_is_of_one_model() -> None:
    with pytest.raises(NotExpressed, match="only V3"):
        architecture_of(row("lf-001", model_family="DeepSeek-other"))


NUMBERS = ("layers", "heads", "kv_heads", "tp", "pp", "virtual_pp", "cp", "ep", "n_gpus", "micro_batch", "global_batch", "top_k")
WORDS = ("gpu", "precision", "zero_stage_or_fsdp", "act_ckpt", "software_stack", "attention", "device_variant", "memory_measure")


@st.composite
def disturbed(draw: st.DrawFn) -> Row:
    """A row with a few cells blank, taken from another row, or swapped."""
    names = ("lf-001", "bloom-020", "mlm-001")
    one, other = row(draw(st.sampled_from(names))), row(draw(st.sampled_from(names)))
    changes: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(NUMBERS), max_size=3, unique=True)):
        changes[name] = draw(st.sampled_from([None, 0, 1, 2, 3, 5, 8, 48, getattr(other, name)]))
    for name in draw(st.lists(st.sampled_from(WORDS), max_size=2, unique=True)):
        changes[name] = draw(st.sampled_from(["", "unknown", getattr(other, name)]))
    return row(one.id, **changes)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(disturbed())
def test_any_row_has_a_price_or_a_reason(one: Row) -> None:
    (priced,) = session().price([one])
    assert (priced.evaluation is None) == bool(priced.skipped)
    assert not priced.skipped.startswith("unforeseen"), priced.skipped
    if priced.evaluation is not None:
        assert 0 < priced.evaluation.step_seconds < float("inf") and priced.evaluation.peak_memory_bytes > 0
    report([priced]).document()
