"""Pipelines whose calls of one block have plans of their own, since the memory of a stage is not enough for all alike."""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers
from support.harness.end_to_end import check_programs, plan, prepare_model
from support.harness.rank_pool import RankPool
from support.models.small_models import VOCABULARY, token_batch

from autopar.cost_models.hardware.cluster import Cluster
from autopar.program.build import program_text


def test_equals_one_process(ranks: RankPool) -> None:
    """Seven layers on two stages, with 90 % and 60 % of the memory that they take where nothing is recomputed."""
    torch.manual_seed(0)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=32, n_layer=7, n_head=4, vocab_size=VOCABULARY, n_positions=64, **rates)
    case = prepare_model("gpt2", transformers.GPT2LMHeadModel(config).double(), token_batch(16))
    cluster, force = Cluster.parse("local:2"), {"pp": 2, "dp": 1}
    most = plan(case, force, cluster).evaluation
    assert most is not None
    base = dict(most.memory)["base"]
    budget_share = most.memory_budget_bytes / cluster.device.memory_bytes
    texts = []
    for share in (0.9, 0.6):
        budget = base + share * (most.peak_memory_bytes - base)
        device = replace(cluster.device, memory_bytes=int(budget / budget_share))
        result = plan(case, force, replace(cluster, device=device))
        assert result.candidate is not None and result.graph is not None
        layers = {plan for plan in result.candidate.blocks if "Block" in plan.block}
        assert len({(each.recompute, each.recompute_nodes) for each in layers}) == 2
        texts.append(program_text(result.graph, result.candidate))
    check_programs(ranks, case, texts, world=2)
