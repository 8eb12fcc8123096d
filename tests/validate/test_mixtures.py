"""What published mixtures do beside their degrees: dispatcher, recomputed modules, overlap, casts; and runs that ran fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.oracles.published_rows import row

from autopar.cost_models.compute.experts import ExpertsCost
from autopar.cost_models.hardware.cluster import Cluster
from autopar.operations.experts import ExpertShapes
from autopar.validate.configuration import recompute_of, recomputes_activation, sends_once
from autopar.validate.price import Session
from autopar.validate.report import least_bytes
from autopar.validate.summary import UNSURE

SESSION = Session()


@pytest.mark.parametrize(
    ("name", "once", "recompute", "again"),
    [
        ("mb-050", True, "modules", False),
        ("mb-002", True, "none", False),
        ("mb-008", False, "modules", True),
        ("zoo-001", True, "modules", True),
        ("zoo-004", False, "modules", True),
        ("dg-042", False, "none", False),
    ],
)
def test_facts_of_a_run_are_read(name: str, once: bool, recompute: str, again: bool) -> None:
    each = row(name)
    assert (sends_once(each), recompute_of(each), recomputes_activation(each)) == (once, recompute, again)


@pytest.mark.parametrize("name", ["dg-031", "dg-113", "mb-029", "mb-035", "mb-050"])
def test_what_ran_is_not_sure_to_run_out(name: str) -> None:
    """They were: master weights were whole, float8 copies of gathered operands too, and nothing was recomputed."""
    (found,) = SESSION.price([row(name)])
    assert found.evaluation is not None
    assert least_bytes(found.row, found.evaluation) <= (1 + UNSURE) * found.evaluation.memory_capacity_bytes


def test_modules_save_memory_for_little_time() -> None:
    """GPT-OSS with norms and the experts' activation recomputed, and DeepSeek-V3 with the products up from its latents."""
    for name in ("mb-019", "mb-050"):
        kept, again = SESSION.price([row(name, act_ckpt="none"), row(name)])
        assert kept.evaluation is not None and again.evaluation is not None
        assert again.evaluation.peak_memory_bytes < 0.95 * kept.evaluation.peak_memory_bytes
        assert 1.0 < again.evaluation.step_seconds / kept.evaluation.step_seconds < 1.10


def test_the_dispatcher_and_its_overlap_change_the_price() -> None:
    """Experts over 4 nodes: every copy sent is slower than once a node, which is slower than overlapped; overlap is not free."""
    once = row("zoo-001")
    every = row("zoo-001", notes=once.notes.replace("DeepEP", "all-to-all"))
    hidden = row("zoo-001", ep_overlap=1)
    seconds = [found.evaluation.step_seconds for found in SESSION.price([every, once, hidden]) if found.evaluation is not None]
    assert len(seconds) == 3 and seconds[0] > 1.05 * seconds[1] > 1.05 * seconds[2]
    free = Session(lambda cluster, each, constants: _without_contention(SESSION.stack(cluster, each, constants)))
    (found,) = free.price([hidden])
    assert found.evaluation is not None and found.evaluation.step_seconds < seconds[2]


def _without_contention(cluster: Cluster) -> Cluster:
    return replace(cluster, overlap=replace(cluster.overlap, contention=0.0))


def test_float8_casts_of_experts_take_time() -> None:
    """Products of half the time, and casts and padding beside them: less than twice as fast."""
    device = Cluster.parse("dgx-h100:1").device
    cost = ExpertsCost(ExpertShapes(tokens=32768, top_k=2, experts=8, ep=1, hidden=6144, up=32768, down=16384), 2)
    half = cost.seconds(device, "bfloat16", 8, 1, 1)
    eight = cost.seconds(device, "float8", 8, 1, 1)
    assert all(0.5 < fast / slow < 1.0 for fast, slow in zip(eight, half, strict=True))
    again = replace(cost, recompute_activation=True).seconds(device, "bfloat16", 8, 1, 1)
    assert again[0] == half[0] and again[1] > half[1]


def test_a_float8_copy_is_saved_as_the_shard_that_was_gathered() -> None:
    """Nemotron-4-340B in float8 saves less than in bfloat16, of which a copy has twice the bytes."""
    wide, narrow = SESSION.price([row("dg-031"), row("dg-113")])
    assert wide.evaluation is not None and narrow.evaluation is not None
    kinds = [dict(each.evaluation.stage_memory[0].table)["activations"] for each in (wide, narrow) if each.evaluation]
    assert kinds[1] < 0.85 * kinds[0]
