"""Releases that no constant has seen: the table, its errors, and what is a fact of a release."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from support.oracles.published_rows import row, session, table

from autopar.cost_models.compute.experts import ExpertsCost
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.operations.experts import ExpertShapes
from autopar.validate.configuration import dispatcher_permutes, fuses_experts, release_of, uses_cuda_graphs
from autopar.validate.constants import UnseenErrors, unseen_errors, unseen_table
from autopar.validate.price import PricedRow
from autopar.validate.rows import read_table


@lru_cache(maxsize=1)
def priced() -> tuple[PricedRow, ...]:
    return session().price(read_table(unseen_table()))


def errors() -> dict[str, UnseenErrors]:
    return {each.kind: each for each in unseen_errors(priced())}


def test_the_table_is_of_later_releases_and_no_run_is_in_both() -> None:
    rows = read_table(unseen_table())
    assert len(rows) == 159 and len({each.id for each in rows}) == 159
    assert all(release_of(each) >= "26.02" and each.source.startswith("NVIDIA-NeMo/Megatron-Bridge@") for each in rows)

    def run(each: object) -> tuple[object, ...]:
        names = ("model_family", "gpu", "n_gpus", "precision", "global_batch", "micro_batch", "tp", "pp", "cp", "ep")
        return (release_of(each), *(getattr(each, name) for name in names))  # type: ignore[arg-type]

    fitted = {run(each) for each in table().values() if each.software_stack == "megatron-bridge"}
    assert fitted.isdisjoint(map(run, rows))
    skipped = [each.skipped for each in priced() if each.evaluation is None]
    assert skipped == ["precision nvfp4"] * 18


def test_later_releases_are_priced_with_what_was_fitted_before() -> None:
    """Mixtures were 36 % off (median), growing with the release, and 66 % on Blackwell in 26.06."""
    found = errors()
    assert found["dense"].rows == 43 and found["dense"].median < 0.10
    assert found["mixtures"].rows == 98 and found["mixtures"].median < 0.10
    for kind, each in found.items():
        if kind.startswith("mixtures"):
            assert each.median < 0.15, kind


def test_facts_of_a_release_are_read() -> None:
    rows = {each.id: each for each in read_table(unseen_table())}
    assert [release_of(rows[name]) for name in ("late-001", "late-024", "late-090")] == ["26.08", "26.06", "26.04"]
    facts = {name: (dispatcher_permutes(rows[name]), fuses_experts(rows[name]), uses_cuda_graphs(rows[name])) for name in rows}
    assert facts["late-024"] == (True, True, True)
    assert facts["late-090"] == (True, False, False), "26.04: HybridEP, no fused products, graphs of the router alone"
    assert facts["late-054"] == (False, False, True)
    assert not any(facts[each.id][1] for each in rows.values() if release_of(each) < "26.06")
    assert release_of(row("tt-001")) == ""


def test_what_is_fused_is_not_streamed() -> None:
    """What remains beside the products of float8: copies written and read once, and one cast of them, each way."""
    device = replace(Cluster.parse("dgx-b200:1").device, bandwidth_bytes_per_second=1e9)  # nothing but streaming counts
    shapes = ExpertShapes(tokens=4096, top_k=8, experts=128, ep=8, hidden=2048, up=1536, down=768)
    plain = ExpertsCost(shapes, 2)
    sorted_by_dispatch = replace(plain, permuted=True)
    fused = replace(sorted_by_dispatch, fused=True)
    each = [sum(cost.seconds(device, "float8", 1, 1)) for cost in (plain, sorted_by_dispatch, fused)]
    stream = shapes.copies * 2 / (1e9 * device.bandwidth_fraction)
    hidden, inner = shapes.hidden, shapes.up + shapes.down
    assert each[1] - each[2] == pytest.approx(stream * (3 * inner + 2 * inner))
    assert each[0] - each[1] == pytest.approx(stream * (3 * 8 - 2 * 2 + 2 * 4) * hidden)


def test_dropless_mixtures_wait_for_the_host() -> None:
    """With one sequence of 4,096 tokens a layer took as long on a B200 as on an H100, and was priced at half of that."""
    b200 = row("mb-030")
    eager, replayed = session().price([b200, replace(b200, notes=b200.notes + "; full-iteration CUDA graph")])
    assert eager.evaluation is not None and replayed.evaluation is not None
    assert abs(eager.error or 1.0) < 0.10 and (replayed.error or 0.0) < -0.4
    assert eager.evaluation.launch_stall_seconds > 0 == replayed.evaluation.launch_stall_seconds
    (dropped,) = session().price([row("mb-044")])
    assert dropped.evaluation is not None
    assert dropped.evaluation.launch_stall_seconds < 0.01 * dropped.evaluation.step_seconds


def test_a_stack_without_an_entry_says_whose_constants_it_has() -> None:
    """automodel, and NeMo on an A100, were priced with other constants without a word."""
    known, other, unknown = session().price(
        [row("lf-001"), row("am-005"), row("lf-001", gpu="V100", software_stack="nemo-megatron-core")]
    )
    assert not any("no constants" in text for text in known.assumed)
    assert "no constants of automodel-fsdp2 on hopper: those of autopar" in other.assumed
    assert "no constants of nemo-megatron-core on volta: the estimates of the cluster's file" in unknown.assumed


def test_tf32_is_not_float32() -> None:
    """Products in TF32 were priced at the rate of float32, a seventh of it."""
    whole, tf32 = session().price([row("lf-001", precision="fp32"), row("lf-001", precision="tf32")])
    assert whole.evaluation is not None and tf32.evaluation is not None
    assert 3 * tf32.evaluation.step_seconds < whole.evaluation.step_seconds
    device = Cluster.parse("dgx-h100:1").device
    fast = replace(device, tf32=True)
    assert fast.product_flops_per_second("float32") == pytest.approx(494.5e12 * device.matmul_fraction)
    assert fast.product_flops_per_second("bfloat16") == device.product_flops_per_second("bfloat16")
    v100 = replace(Cluster.parse("dgx-v100:1").device, tf32=True)
    assert v100.product_flops_per_second("float32") == Cluster.parse("dgx-v100:1").device.product_flops_per_second("float32")


SAILOR = (("dp1", 8, 1, 2, 32, 0.65705), ("dp8", 64, 8, 2, 1024, 2.31116), ("dp32", 128, 32, 1, 1024, 1.02594))
"""OPT-350M on GH200, tp=4, micro-batches of 8, in nvcr.io/nvidia/pytorch:24.10-py3, which allows TF32: devices, dp, pp, batch,
and `real` of sailor/Planner/simulations/validation/clariden/OPT-350 (eth-easl/sailor: N2_D1, N16_D8, N32_D32)."""


def test_runs_in_tf32_are_priced_as_such() -> None:
    """As float32 they were 80 to 90 % off on a GH200."""
    shape = dict(model_family="OPT-350M", layers=24, hidden=1024, ffn_hidden=4096, heads=16, kv_heads=None, vocab=50272)
    how = dict(seq_len=2048, gpu="GH200", tp=4, micro_batch=8, zero_stage_or_fsdp="none", act_ckpt="none", head_dim=64)
    rows = [
        row(
            "bloom-020", id=f"{name}-{precision}", notes="", attention="naive", precision=precision, **shape, **how,
            n_gpus=devices, dp=dp, pp=pp, virtual_pp=1, global_batch=batch, step_seconds=seconds,
        )
        for precision in ("fp32", "tf32")
        for name, devices, dp, pp, batch, seconds in SAILOR
    ]  # fmt: skip
    errors_of = [each.error for each in session().price(rows)]
    assert all(error is not None and error > 0.7 for error in errors_of[:3])
    assert all(error is not None and abs(error) < 0.25 for error in errors_of[3:])


def test_a_clusters_own_launches_remain() -> None:
    """Only a stack of which something is known replaces what the file says; nothing is said of our own programs."""
    cluster = Cluster.parse("dgx-h100:1")
    assert cluster.device.host_launch_seconds == 0.0
    said = replace(cluster, device=replace(cluster.device, host_launch_seconds=2e-5))
    assert with_stack(said, compiled=True).device.host_launch_seconds == 2e-5
    assert with_stack(said, "megatron-bridge").device.host_launch_seconds == pytest.approx(1e-5)
    assert with_stack(said, graphs=True).device.host_launch_seconds == 0.0
