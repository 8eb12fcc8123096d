"""Forced degrees on real processes, planned in the words of ``--force``: loss, gradients and parameters are those of one
process."""

from __future__ import annotations

import pytest
from support.harness.comparison import Outcome, differences
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.plans.forced_plans import MODEL_AXES, forced_plan, whole_of_able, world_of

from autopar.program.build import program_text
from autopar.solve.space.force import parse_force

TENSOR = ("tp=4", "dp=2,tp=2", "pp=2,tp=2", "tp=2,tp2=2")
EXPERTS = ("ep=4", "dp=2,ep=2", "pp=2,ep=2", "ep=2,tp=2")
EIGHT = ("pp=2,dp=2,tp=2,zero=3", "pp=2,tp=2,tp2=2", "dp=2,tp=2,tp2=2")
DENSE = ("gpt2", "llama", "bert", "vit", "mlp", "convnet", "encoder_decoder", "convnext", "mamba2", "dit")
MIXTURES = ("deepseek_v3", "mixtral", "qwen3_moe", "routed")
WHOLE_BATCH = ("mixtral", "qwen3_moe", "routed")
"""Their losses need the whole batch: no pipeline."""


def check(runs: list[tuple[str, str]], ranks: RankPool) -> None:
    """(model, force), all of one world."""
    found = [(name, force, prepare(name), forced_plan(prepare(name), force)) for name, force in runs]
    for name, force, _, plan in found:
        for axis in set(MODEL_AXES) & set(parse_force(force).degrees):
            assert whole_of_able(plan, axis) <= 0.02, f"{name}, {force}"
    jobs = [(program_text(plan.graph, plan.candidate), case.state, case.batch) for _, _, case, plan in found]
    world = world_of(runs[0][1])
    told = ranks.run(train_pipelines, jobs, world=world, timeout=60.0 + (10 if world < 8 else 120) * len(jobs))
    wrong = []
    for rank, results in enumerate(told):
        for (name, force, case, _), (outcome, _) in zip(found, results, strict=True):
            expected = case.expected
            state = expected.parameters | {key: each for key, each in expected.buffers.items() if key in case.state}
            held = {key: each for key, each in (outcome.parameters | outcome.buffers).items() if key in state}
            wanted = Outcome(*expected[:2], {key: state[key] for key in held}, {})
            wrong += [f"{name}, {force}, rank {rank}: {text}" for text in differences(Outcome(*outcome[:2], held, {}), wanted, 1e-9)]
    assert not wrong, "\n".join(wrong[:20])


def test_four_processes(ranks: RankPool) -> None:
    check([("gpt2", "pp=2,tp=2"), ("mlp", "pp=2,tp=2"), ("mlp", "tp=2,tp2=2"), ("convnet", "pp=2,tp=2"),
           ("deepseek_v3", "pp=2,ep=2")], ranks)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_every_dense_model(name: str, ranks: RankPool) -> None:
    check([(name, force) for force in (*TENSOR, "pp=2,ep=2")], ranks)
    check([(name, force) for force in EIGHT], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture(name: str, ranks: RankPool) -> None:
    forces = (*EXPERTS, "tp=4", "pp=2,tp=2")
    check([(name, force) for force in forces if "pp" not in force or name not in WHOLE_BATCH], ranks)
    if name not in WHOLE_BATCH:
        check([(name, "pp=2,dp=2,ep=2"), (name, "pp=2,ep=2,tp=2")], ranks)
