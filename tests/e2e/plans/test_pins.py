"""Programs of pinned plans equal one process, on real ranks, in float64."""

from __future__ import annotations

from support.harness.end_to_end import check_programs, prepare
from support.harness.rank_pool import RankPool

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Precision
from autopar.program.build import program_text
from autopar.solve.problem.pins import why_disobeyed_pins
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions

PLANS: list[tuple[dict[str, int], dict[str, dict[str, str]]]] = [
    (
        {"pp": 1, "dp": 2, "tp": 2},
        {"transformer.h.*.mlp.c_fc.weight": {"tp": "S(1)"}, "transformer.h.*": {"tp": "S(1)"}, "lm_head": {"tp": "R"}},
    ),
    (
        {"pp": 2, "tp": 2},
        {"transformer.h.*.mlp.c_proj": {"tp": "R"}, "transformer.h.*.attn.c_proj": {"tp": "S(2)"},
         "transformer.wte.weight": {"tp": "S(0)"}},
    ),
]  # fmt: skip


def test_equals_one_process(ranks: RankPool) -> None:
    """A sequence that is cut between layers, reductions where they are pinned, and a pipeline of such stages."""
    prepared, programs = prepare("gpt2"), []
    for force, pins in PLANS:
        options = SearchOptions(batch=16, precision=Precision("float64", "float64"), force=force, pins=pins)
        result = search(prepared.graph, Cluster.parse("local:4"), options)
        assert why_disobeyed_pins(result.graph, result.candidate, pins) == ""
        programs.append(program_text(result.graph, result.candidate))
    check_programs(ranks, prepared, programs, [force for force, _ in PLANS])
