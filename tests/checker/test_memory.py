"""The bound of memory is above what a rank holds (torch's count of live tensors in a dry run), and not far above."""

from __future__ import annotations

import pytest
from support.plans.forced_plans import bundled_graph

from autopar.capture.models import load_model
from autopar.dryrun.run import dry_run
from autopar.ir.plan_file.plan_file import Plan
from autopar.planning import make_plan
from autopar.program.build import prove_program

FAST = (
    ("gpt2-tiny", "dp=2,tp=2"),
    ("gpt2-tiny", "dp=4,zero=3"),
    ("mixtral-tiny", "dp=2,ep=2"),
    ("gpt2-tiny", "pp=2,dp=2,schedule=zb-h1"),
)
SLOW = (
    ("llama-tiny", "dp=2,tp=2"),
    ("llama-tiny", "pp=2,dp=2,schedule=zb-h1"),
    ("gpt2-tiny", "dp=2,tp=2,zero=2,micro=2"),
    ("bert-tiny", "tp=4"),
    ("qwen3-tiny", "dp=4,zero=1,micro=1"),
    ("vit-tiny", "dp=2,tp=2"),
    ("convnet", "dp=4"),
    ("mlp", "dp=2,tp=2"),
    ("llama-tiny", "pp=2,dp=2,schedule=1f1b"),
    ("llama-tiny", "pp=2,dp=2,virtual=1,schedule=gpipe"),
    ("llama-tiny", "dp=2,tp=2,pp=1,zero=1,micro_batches=2,recompute=full,zero_group=0,sequence_parallel=1"),
    ("llama-tiny", "dp=2,tp=2,pp=1,zero=2,micro_batches=1,recompute=selective,zero_group=0,sequence_parallel=1"),
)
MOST = 3.0
"""Times what was measured. The models are so small that buffers of gathers and reductions, of which a bound has two, are much."""


def plan_of(name: str, force: str) -> Plan:
    loaded = load_model(name, 32)
    assert isinstance(loaded.example_inputs, dict)
    return make_plan(loaded.model, "local:4", loaded.example_inputs, force=force, graph=bundled_graph(name, 32))


@pytest.mark.parametrize(("name", "force"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_bound_is_above_what_a_rank_holds(name: str, force: str) -> None:
    plan = plan_of(name, force)
    certificate = prove_program(plan)
    assert certificate.holds, certificate.line()
    for stage, bound in enumerate(certificate.bounds):
        measured = dry_run(plan, stage * plan.candidate.mesh.size).peak_bytes
        print(f"{name}, {force}, stage {stage}: at most {bound:,}, measured {measured:,}, {bound / measured:.2f} times")
        assert measured <= bound <= MOST * measured
