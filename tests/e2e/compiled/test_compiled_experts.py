"""Compiled mixtures of experts: one graph of each block, with the numbers of one process, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from support.harness.comparison import differences
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import Case, Outcome, train_compiled, train_pipelines
from support.plans.drawn_recomputation import with_kept
from support.plans.expert_forms import result_of
from torch._dynamo.utils import counters

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.pipeline.stage_values import repeatable_values
from autopar.ir.plan import Pipeline
from autopar.program.build import program_text

SLOW = partial(pytest.param, marks=pytest.mark.slow)
PARTITIONED = "aot_eager_decomp_partition"
"""AOTAutograd with the partition of inductor, and no kernels to compile."""
FORMS = {
    "routed": ("inside, dp=2,tp=2", "dispatched, ep=4", "owned, dp=2,tp=2", "dispatched, ep=2,tp=2", "dispatched, ep=2"),
    "routed_capacity": ("owned, dp=2,tp=2", "dispatched, ep=4"),
    "deepseek_v3": ("dispatched, in micro-batches",),
    "gpt_oss": ("dispatched, ep=2,tp=2",),
}


def train_in_graphs(cases: Sequence[Case], backend: str) -> tuple[list[Outcome], list[str]]:
    """On a rank: what compiled programs give, what was said, and why torch.compile left a graph."""
    counters.clear()
    outcomes, said = train_compiled(cases, backend)
    return outcomes, [*said, *counters["graph_break"]]


@pytest.mark.parametrize(
    ("name", "backend", "forms"),
    [
        ("routed", PARTITIONED, 1),
        SLOW("routed", PARTITIONED, 5),
        SLOW("deepseek_v3", PARTITIONED, 1),
        SLOW("routed_capacity", PARTITIONED, 2),
        SLOW("gpt_oss", PARTITIONED, 1),
        SLOW("routed", "inductor", 1),
        SLOW("deepseek_v3", "inductor", 1),
    ],
)
def test_equals_one_process(name: str, backend: str, forms: int, ranks: RankPool) -> None:
    """Saving all, recomputing whole blocks, and single operations; every block is one graph."""
    prepared = prepare(name)
    texts: dict[int, list[str]] = {}
    for form in FORMS[name][-forms:]:
        plain = result_of(prepared, form).candidate
        whole = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
        some = with_kept(prepared.graph, plain, Cluster.parse(f"local:{plain.mesh.size}"), 1, share=0.3)
        own = texts.setdefault(plain.mesh.size, [])
        own += [program_text(prepared.graph, each) for each in (plain, whole, some)]
    for world, programs in texts.items():
        cases = [(text, prepared.state, prepared.batch) for text in programs]
        for outcomes, said in ranks.run(train_in_graphs, cases, backend, world=world, timeout=600):
            for found, text in zip(outcomes, programs, strict=True):
                wrong = differences(found, prepared.expected, 1e-9)
                assert not wrong, f"{wrong[:5]}\n{text}"
            assert not said


def test_tokens_in_flight_where_a_graph_ends(ranks: RankPool) -> None:
    """Products of a backward that is split are no part of graphs: shared experts stand between the calls of the others."""
    prepared = prepare("deepseek_v3")
    candidate = result_of(prepared, "dispatched, ep=2").candidate
    pipeline = Pipeline(2, 1, "zb-h1", repeated=tuple(repeatable_values(prepared.graph)))
    text = program_text(prepared.graph, replace(candidate, micro_batches=4, pipeline=pipeline))
    between = text[text.index("C.moe_experts_start(") : text.index("C.moe_experts_wait(")]
    assert "linear" in between
    expected = prepared.expected
    for ((found, _),) in ranks.run(train_pipelines, [(text, prepared.state, prepared.batch)], compile=PARTITIONED, timeout=400):
        there = {name: expected.parameters[name] for name in found.parameters if name in expected.parameters}
        own = found._replace(parameters={name: found.parameters[name] for name in there}, buffers={})
        wrong = differences(own, expected._replace(parameters=there), 1e-9)
        assert there and not wrong, wrong[:5]
