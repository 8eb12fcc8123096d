"""What software with fused kernels saves for the backward, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.oracles.published_rows import row, session

from autopar.cost_models.hardware.software_stacks import state_layouts
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.evaluate import evaluate
from autopar.cost_models.step.recompute import RecomputePlan
from autopar.cost_models.step.stage_devices import stage_clusters
from autopar.validate.price import stack_of


def saved_bytes(name: str, **changes: object) -> dict[str, float]:
    """Of a layer of a row, by value."""
    each = row(name, **changes)
    setup = session().setup(each)
    cluster = stage_clusters(stack_of(setup.cluster, each, None), setup.candidate.pipeline.stages)[0]
    block = max(setup.graph.blocks, key=lambda one: setup.graph.count(one.name))
    plan, candidate = setup.candidate.block(block.name), setup.candidate
    costs = BlockCosts(block, candidate.mesh, candidate.micro_batch, cluster)
    found = RecomputePlan.of(costs, plan).saved
    total: dict[str, float] = {}
    for (value, _), size in found.items():
        total[value] = total.get(value, 0.0) + size
    return total


def test_a_megatron_layer_by_hand() -> None:
    """405B, 4096 tokens a rank (seq 8192, cp=2) and tp=8 with sequence parallelism: of a token, h/8 elements each of the
    inputs and results of two norms and of the attention's result, the queries and keys after rotation and a copy of the values
    (a part of the fused projection is not contiguous: Transformer Engine's `get_qkv_layout` copies it), 2 x ffn/8 of the up
    product and ffn/8 of the gate's result (arXiv 2205.05198, section 4; Transformer Engine)."""
    tokens, hidden, ffn, heads, kv_heads, head = 4096, 16384, 53248, 128, 16, 128
    of_token = 5 * hidden + (heads + kv_heads) * head + kv_heads * head + 3 * ffn
    found = saved_bytes("dg-015")
    tables = 2 * 4096 * head * 2  # cosine and sine, shared by all layers
    logsumexp = 4 * tokens * heads / 8
    assert sum(found.values()) == pytest.approx(2 * tokens * of_token / 8 + tables + logsumexp, rel=1e-3)
    assert "silu" not in found and "rms_norm+" not in found


def test_without_fused_kernels_more_is_saved() -> None:
    layout = state_layouts()
    assert layout["nemo-megatron-core"].fused_saves and layout["nemo-megatron-core"].regathered_operands
    assert sum(saved_bytes("dg-015", software_stack="unknown").values()) > 2 * sum(saved_bytes("dg-015").values())


def test_sliced_experts_save_slices() -> None:
    """tp=4 slices Grok's experts: of two copies of each of 4096 tokens, the input is whole and 3 x ffn/4 are inside."""
    inside = 2 * 4096 * (6144 + 3 * 32768 / 4) * 2
    assert saved_bytes("dg-042")["experts+"] == pytest.approx(inside, rel=1e-3)


def test_memory_alone_changes() -> None:
    """Saved tensors are no work: times are those of the stack's constants."""
    each = row("dg-006")
    setup = session().setup(each)
    cluster = stack_of(setup.cluster, each, None)
    plain = replace(cluster, state_layout=replace(cluster.state_layout, fused_saves=False, regathered_operands=False))
    less, more = (evaluate(setup.graph, setup.candidate, on) for on in (cluster, plain))
    assert less.step_seconds == more.step_seconds and less.peak_memory_bytes < more.peak_memory_bytes
