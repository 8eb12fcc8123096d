"""Programs of data ranks with uneven shards of the batch: their text, and what cannot have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.mixed_graph import mixed_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Value
from autopar.ir.placement import parse_placements
from autopar.ir.plan import Candidate
from autopar.passes.lower import lower
from autopar.passes.lowered import Lowered
from autopar.program.build import render
from autopar.rules.localize import require_whole_examples


def uneven(kind: str, seed: int = 0) -> tuple[Graph, Candidate, Lowered]:
    graph = mixed_graph(3) if kind == "mixed" else gpt2_graph(3, 16, 4, 32, 8, 8)
    candidate = replace(drawn_candidate(graph, mesh_of(dp=2, tp=2), seed, wild=0.0), batch=7)
    return graph, candidate, lower(graph, candidate, uneven=True)


@pytest.mark.parametrize("kind", ["gpt2", "mixed"])
def test_sizes_are_those_of_this_rank_or_of_all(kind: str) -> None:
    """B never comes from a shape, which may be that of the whole batch."""
    text = render(uneven(kind)[2])
    assert "B is the batch of one data-parallel rank: at most 4 in the plan" in text
    lines = {line.strip() for line in text.splitlines() if line.strip().startswith(("B =", "B_all ="))}
    assert lines and lines <= {"B = self.mesh.own_examples", "B_all = self.mesh.all_examples"}
    assert "2 * B" not in "".join(line.split("#")[0] for line in text.splitlines())


def test_what_cannot_have_them() -> None:
    graph, candidate, _ = uneven("gpt2")
    for wrong, changed, reason in (
        (graph, replace(candidate, micro_batches=2), "micro-batches and pipelines take equal shards"),
        (graph, replace(candidate, batch=1), "leave some of dp=2 without one"),
        (replace(graph, batch_is_symbolic=False), candidate, "captured at a batch of"),
    ):
        with pytest.raises(PlanError, match=reason):
            lower(wrong, changed, uneven=True)
    with pytest.raises(PlanError, match="not divisible by dp=2"):
        lower(graph, candidate)


@pytest.mark.parametrize(
    ("shape", "placements", "fits"),
    [
        (("B", 16), "S(0) R", True),
        (("16*B",), "S(0) S(0)", True),
        (("2*B",), "S(0,2) R", True),
        (("B",), "S(0) S(0)", False),  # half of an example, or of an odd number of them
        (("B", 16), "R S(0)", False),
        (("B/2", 2), "S(0) R", False),
        ((8, 16), "S(0) R", False),
        (("3*B",), "S(0,2) R", False),
        (("B", "B"), "S(1) R", True),
        ((8, 16), "R S(0)", True),
    ],
)
def test_shards_are_whole_examples(shape: tuple[int | str, ...], placements: str, fits: bool) -> None:
    value = Value("x", shape, "float32")
    if fits:
        require_whole_examples(value, parse_placements(placements), mesh_of(dp=2, tp=2))
        return
    with pytest.raises(PlanError, match="whole examples"):
        require_whole_examples(value, parse_placements(placements), mesh_of(dp=2, tp=2))
