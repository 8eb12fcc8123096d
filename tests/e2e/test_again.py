"""Plans that run parts of the forward again and keep others on the host, on real processes: they train like one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from support.candidates import drawn_candidate, mesh_of
from support.endtoend import Prepared, differences, prepare, prepare_dropout, run_programs
from support.ranks import Ranks
from support.replays import with_replays

from autopar.ir.plan import Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.passes.pipeline import lower
from autopar.program.source import render

TOLERANCE = 1e-9
F64 = Precision("float64", "float64")
SLOW = partial(pytest.param, marks=pytest.mark.slow)
MESHES = ({"dp": 4}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2})


def drawn(prepared: Prepared, seed: int, zero: int, many: int, axes: dict[str, int]) -> Candidate:
    """Nearly everything sensible, with random parts again and on the host."""
    once = drawn_candidate(prepared.graph, mesh_of(**axes), seed, zero=zero, wild=0.0, precision=F64)
    candidate = with_replays(prepared.graph, replace(once, micro_batches=many), seed, share=(0.3, 0.6, 0.9, 1.0)[seed % 4])
    verify_candidate(prepared.graph, candidate)
    return candidate


@pytest.mark.parametrize("name", [SLOW("mlp"), "gpt2", "llama", SLOW("vit")])
def test_trains_like_one_process(name: str, ranks: Ranks) -> None:
    """Loss and gradients, and parameters after three steps, in one and in two micro-batches."""
    prepared = prepare(name)
    cases = [(zero, 1 + (zero + index) % 2, axes) for index, axes in enumerate(MESHES) for zero in range(4)]
    cases = [case for case in cases if case[0] == 0 or case[2]["dp"] > 1]
    cases = {"gpt2": cases[3::2], "llama": cases[1::4], "vit": cases[2::4]}.get(name, cases)
    texts = [render(lower(prepared.graph, drawn(prepared, seed, *case))) for seed, case in enumerate(cases)]
    assert all("again(" in text for text in texts) and "again.offload(" in "".join(texts)
    results = ranks.run(run_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=400)
    for rank in (0, 3):
        for case, text, found in zip(cases, texts, results[rank], strict=True):
            wrong = differences(found, prepared.expected, TOLERANCE)
            assert not wrong, f"{name}, {case}, rank {rank}: {wrong[:5]}\n{text}"


@pytest.mark.parametrize("axes", [SLOW(MESHES[0]), SLOW(MESHES[1]), MESHES[2]], ids=str)
def test_random_operations_draw_the_same_again(axes: dict[str, int], ranks: Ranks) -> None:
    """GPT-2 with dropout, attention's too: what runs again, each part or the whole of a block, changes no number."""
    prepared = prepare_dropout()
    graph = prepared.graph
    plain = drawn_candidate(graph, mesh_of(**axes), 1, zero=3 if axes["dp"] > 1 else 0, wild=0.0, precision=F64)
    plain = replace(plain, micro_batches=2)
    whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    plans = (plain, whole, with_replays(graph, plain, 0, 1.0), with_replays(graph, plain, 1))
    texts = [render(lower(graph, each)) for each in plans]
    assert "    draws = True\n" in texts[1] and "again(C.dropout" in texts[2] and "C.attention_dropout, " in texts[2]
    results = ranks.run(run_programs, [(text, prepared.state, prepared.batch) for text in texts], timeout=200)
    for first, *others in (results[0], results[3]):
        for found, text in zip(others, texts[1:], strict=True):
            assert not differences(found, first, TOLERANCE), text
