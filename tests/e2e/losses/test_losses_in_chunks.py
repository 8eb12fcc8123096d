"""Plans whose loss is computed in chunks of tokens, from the operands of the head, train like one process, on real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, check_programs, prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import Case, train_compiled
from support.plans.drawn_candidates import drawn_candidate
from support.plans.forced_plans import forced_plan, with_losses_in_chunks
from support.plans.mesh import mesh_of

from autopar.checker.certificate import certify
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate, Precision
from autopar.operations.losses import CHUNK_TOKENS
from autopar.program.build import program_text

TOLERANCE = 1e-9
F64 = Precision("float64", "float64")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
WHOLE, SHARDED = "C.linear_cross_entropy_sum(", "C.linear_cross_entropy_sharded("
CHUNK = f"-100, 0.0, {CHUNK_TOKENS}"


def text_in_chunks(graph: Graph, candidate: Candidate, function: str, recompute: bool = False) -> str:
    """The program, proven, with chunks of 20 tokens, of which each rank has 32 at least. `recompute`: whole blocks run again."""
    candidate = with_losses_in_chunks(graph, candidate)
    if recompute:
        candidate = replace(candidate, blocks=tuple(replace(block, recompute=True) for block in candidate.blocks))
    text = program_text(graph, candidate)
    assert function in text and text.count(CHUNK) == 1
    certificate = certify(text, graph, candidate)
    assert certificate.holds, certificate.refused
    return text.replace(CHUNK, "-100, 0.0, 20")


def drawn_text(prepared: Prepared, axes: dict[str, int], seed: int, zero: int, many: int, function: str, **more: bool) -> str:
    drawn = drawn_candidate(prepared.graph, mesh_of(**axes), seed, zero=zero, wild=0.0, precision=F64)
    return text_in_chunks(prepared.graph, replace(drawn, micro_batches=many), function, **more)


def texts_of(prepared: Prepared) -> list[str]:
    """Tokens or the vocabulary sharded, or neither; the head's weight sharded by ZeRO; several micro-batches; a pipeline; whole
    blocks run again."""
    texts = [drawn_text(prepared, {"dp": 1, "tp": 4}, 3, 0, 2, WHOLE)]
    if prepared.name == "gpt2":
        return [*texts, drawn_text(prepared, {"dp": 2, "tp": 2}, 1, 3, 2, SHARDED)]
    piped = forced_plan(prepared, "pp=2,dp=2")
    texts += [drawn_text(prepared, {"dp": 4}, 0, 3, 2, WHOLE), text_in_chunks(piped.graph, piped.candidate, WHOLE)]
    return [*texts, drawn_text(prepared, {"dp": 2, "tp": 2}, 0, 1, 1, WHOLE, recompute=True)]


@pytest.mark.parametrize("name", ["gpt2", SLOW("bert")])
def test_losses_in_chunks_train_like_one_process(name: str, ranks: RankPool) -> None:
    """GPT-2's head is its table of words, BERT's has a bias. Loss, gradients, and parameters after three steps."""
    prepared = prepare(name)
    texts = texts_of(prepared)
    check_programs(ranks, prepared, texts)


@pytest.mark.parametrize("backend", [SLOW("aot_eager"), SLOW("inductor")])
def test_compiled_losses_in_chunks_are_the_same(backend: str, ranks: RankPool) -> None:
    prepared = prepare("gpt2")
    text = drawn_text(prepared, {"dp": 2, "tp": 2}, 1, 3, 2, SHARDED)
    cases: list[Case] = [(text, prepared.state, prepared.batch)]
    for outcomes, said in ranks.run(train_compiled, cases, backend, timeout=400):
        assert not said
        assert not differences(outcomes[0], prepared.expected, TOLERANCE)
