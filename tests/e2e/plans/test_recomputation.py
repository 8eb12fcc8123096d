"""Plans that recompute some operations and offload some tensors train like one process, on real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.harness.comparison import differences
from support.harness.end_to_end import Prepared, check_programs, prepare, prepare_dropout
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_programs
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_replays
from support.plans.mesh import mesh_of

from autopar.ir.partition_saved import saving_everything
from autopar.ir.pipeline.stage_variants import with_stage_variants
from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.program.build import program_text

TOLERANCE = 1e-9
F64 = Precision("float64", "float64")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
MESHES = ({"dp": 4}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2})


def drawn(prepared: Prepared, seed: int, zero: int, many: int, axes: dict[str, int]) -> Candidate:
    """Nearly everything sensible, with random recomputation and offload."""
    once = drawn_candidate(prepared.graph, mesh_of(**axes), seed, zero=zero, wild=0.0, precision=F64)
    candidate = with_replays(prepared.graph, replace(once, micro_batches=many), seed, share=(0.3, 0.6, 0.9, 1.0)[seed % 4])
    verify_candidate(prepared.graph, candidate)
    return candidate


@pytest.mark.parametrize("name", [SLOW("mlp"), "gpt2", "llama", SLOW("vit")])
def test_recompute_and_offload_train_like_one_process(name: str, ranks: RankPool) -> None:
    """Loss and gradients, and parameters after three steps, in one and in two micro-batches."""
    prepared = prepare(name)
    cases = [(zero, 1 + (zero + index) % 2, axes) for index, axes in enumerate(MESHES) for zero in range(4)]
    cases = [case for case in cases if case[0] == 0 or case[2]["dp"] > 1]
    cases = {"gpt2": cases[3::2], "llama": cases[1::4], "vit": cases[2::4]}.get(name, cases)
    texts = [program_text(prepared.graph, drawn(prepared, seed, *case)) for seed, case in enumerate(cases)]
    assert all("recompute(" in text for text in texts) and "recompute.offload(" in "".join(texts)
    check_programs(ranks, prepared, texts, cases)


@pytest.mark.parametrize("name, axes", [("gpt2", MESHES[0]), ("llama", MESHES[2])], ids=str)
def test_layers_with_two_plans_train_like_one_process(name: str, axes: dict[str, int], ranks: RankPool) -> None:
    """One layer is recomputed as a whole and sharded as in ZeRO-1, the other recomputed in part and as in ZeRO-3."""
    prepared = prepare(name)
    graph, fast = prepared.graph, drawn(prepared, 1, 3, 1, axes)
    frugal = replace(fast, blocks=tuple(replace(saving_everything(block), recompute=True, zero=1) for block in fast.blocks))
    layers = max((block.name for block in graph.blocks), key=graph.count)
    places = [number for number, call in enumerate(graph.calls) if call.block == layers]
    assert len(places) > 1
    for last in (True, False):
        chosen = places[-1:] if last else places[:1]
        plans = [(frugal if number in chosen else fast).block(call.block) for number, call in enumerate(graph.calls)]
        variants, blocks, _ = with_stage_variants(graph, plans)
        candidate = replace(fast, blocks=blocks)
        verify_candidate(variants, candidate)
        text = program_text(variants, candidate)
        assert text.count(f"class {layers}") == 2
        check_programs(ranks, prepared, [text], [last])


@pytest.mark.parametrize("axes", [SLOW(MESHES[0]), SLOW(MESHES[1]), MESHES[2]], ids=str)
def test_recomputed_random_operations_draw_the_same(axes: dict[str, int], ranks: RankPool) -> None:
    """GPT-2 with dropout, attention's too: recomputation, of single operations or of whole blocks, changes no number."""
    prepared = prepare_dropout()
    graph = prepared.graph
    plain = drawn_candidate(graph, mesh_of(**axes), 1, zero=3 if axes["dp"] > 1 else 0, wild=0.0, precision=F64)
    plain = replace(plain, micro_batches=2)
    whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    plans = (plain, whole, with_replays(graph, plain, 0, 1.0), with_replays(graph, plain, 1))
    texts = [program_text(graph, each) for each in plans]
    assert "    uses_rng = True\n" in texts[1] and "recompute(C.dropout" in texts[2] and "C.attention_dropout, " in texts[2]
    results = ranks.run(train_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)
    for first, *others in (results[0], results[3]):
        for found, text in zip(others, texts[1:], strict=True):
            assert not differences(found, first, TOLERANCE), text
