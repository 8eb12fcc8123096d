"""Models whose whole sequence is cut over an axis, against one process: rotary and learned positions, norms, losses, windows,
attention by ring, by queries and by heads."""

from __future__ import annotations

import pytest
import torch
from support.harness.comparison import differences
from support.harness.end_to_end import prepare, reference, sharding_wins
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.harness.training_loop import graph_state
from support.models.small_models import make
from support.plans.sequence_sharding import sequence_plan

from autopar.capture import capture
from autopar.program.build import program_text
from autopar.verification.single import lift_casts

PLANS = {
    2: (("gpt2", "rows"),),
    4: (("llama", "exchange"), ("gpt2", "ring"), ("mistral", "ring")),
    8: (("llama", "ring"), ("llama", "heads")),
}
MORE = {
    2: (("llama", "ring"), ("mistral", "ring"), ("mistral", "rows"), ("bert", "exchange"), ("gemma3", "ring")),
    4: (("llama", "ring"), ("llama", "rows"), ("gpt2", "exchange"), ("bert", "ring"), ("mistral", "rows")),
    8: (("gpt2", "ring"), ("llama", "rows"), ("qwen3", "rows"), ("modernbert", "ring"), ("mistral", "ring")),
}


def check(ranks: RankPool, size: int, plans: tuple[tuple[str, str], ...]) -> None:
    programs = []
    for model, attention in plans:
        prepared = prepare(model)
        text = program_text(prepared.graph, sequence_plan(prepared.graph, size, attention, sharding_wins(size)))
        assert (f"C.attention_{attention}(" in text) == (attention != "exchange")
        programs.append((text, prepared.state, prepared.batch))
    answers = ranks.run(train_programs, programs, world=size, timeout=300)
    for rank in (0, size - 1):
        for (model, attention), outcome in zip(plans, answers[rank], strict=True):
            wrong = differences(outcome, prepare(model).expected, 1e-9)
            assert not wrong, f"{model} by {attention}, rank {rank}: {wrong[:5]}"


@pytest.mark.parametrize("size", list(PLANS))
def test_equals_one_process(ranks: RankPool, size: int) -> None:
    check(ranks, size, PLANS[size])


def test_padding_stays_whole_in_rows(ranks: RankPool) -> None:
    """With an attention mask ``[B, S]`` a causal model's ring takes ``[B, 1, 1, S]`` beside ``is_causal``."""
    model, batch = make("llama", torch.float64, 4)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, -5:] = batch["attention_mask"][3, -9:] = 0
    graph = lift_casts(capture(model, (), batch, compute_dtype="float64"))
    (attention,) = [node for block in graph.blocks for node in block.nodes if node.op == "ap.attention"]
    assert attention.args[5] is True
    text = program_text(graph, sequence_plan(graph, 4, "ring", sharding_wins(4)))
    answers = ranks.run(train_programs, [(text, graph_state(graph, model), batch)], world=4, timeout=120)
    wrong = differences(answers[3][0], reference(model, batch, True), 1e-9)
    assert not wrong, wrong[:5]


@pytest.mark.slow
@pytest.mark.parametrize("size", list(MORE))
def test_more_equal_one_process(ranks: RankPool, size: int) -> None:
    check(ranks, size, MORE[size])
