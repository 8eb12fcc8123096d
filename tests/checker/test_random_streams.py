"""Random numbers: ranks that hold different elements draw their own, replicas draw alike; a stream that is shared or split is
refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.harness.end_to_end import prepare_dropout
from support.plans.drawn_candidates import drawn_candidate

from autopar.checker.certificate import certify
from autopar.ir.mesh import Axis, Mesh
from autopar.program.build import program_text

AXES = re.compile(r"self\.mesh, (\((?:\"\w+\",? ?|'\w+',? ?)*\))")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_streams(seed: int) -> None:
    graph = prepare_dropout().graph
    candidate = drawn_candidate(graph, Mesh((Axis("dp", 2), Axis("tp", 2))), seed)
    text = program_text(graph, candidate)
    assert certify(text, graph, candidate).holds
    draws = list(AXES.finditer(text))
    assert len(draws) > 3
    for draw in draws:
        for axes in ("()", "('dp',)", "('tp',)", "('dp', 'tp')"):
            if set(re.findall(r"\w+", axes)) != set(re.findall(r"\w+", draw[1])):
                changed = text[: draw.start(1)] + axes + text[draw.end(1) :]
                refused = certify(changed, graph, candidate)
                assert refused.refused is not None and "random numbers differ" in refused.refused[1]


@pytest.mark.slow
def test_a_recomputation_repeats_its_numbers() -> None:
    graph = prepare_dropout().graph
    candidate = drawn_candidate(graph, Mesh((Axis("dp", 2), Axis("tp", 2))), 0)
    candidate = replace(candidate, blocks=tuple(replace(plan, recompute=True) for plan in candidate.blocks))
    text = program_text(graph, candidate)
    assert certify(text, graph, candidate).holds
    assert "uses_rng" in certify(text.replace("    uses_rng = True\n", "", 1), graph, candidate).line()
