"""Forced tensor, second tensor and expert axes, alone, with data parallelism, with a pipeline and with both, on the bundled
models and on small ones: planned, each axis shards 98 % of the FLOPs that its sizes allow and ranks equal one process; or a line
says what forbids it. ``-s`` prints the counts of each model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.harness.comparison import Outcome, differences
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankError, RankPool
from support.harness.run_program import train_pipelines
from support.plans.bundled_cases import TINY, prepare_bundled
from support.plans.forced_plans import MODEL_AXES, forced_plan, whole_of_able, world_of

from autopar.errors import AutoparError
from autopar.program.build import program_text
from autopar.solve.result import PlanResult
from autopar.solve.space.force import parse_force

TENSOR = ("tp=4", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,tp=2")
TWO_AXES = ("tp=2,tp2=2", "dp=2,tp=2,tp2=2", "pp=2,tp=2,tp2=2")
EXPERTS = ("ep=4", "dp=2,ep=2", "pp=2,ep=2", "pp=2,dp=2,ep=2", "ep=2,tp=2", "pp=2,ep=2,tp=2")
FORCES = (*TENSOR, *TWO_AXES, *EXPERTS)
SMALL = ("gpt2", "llama", "bert", "vit", "t5", "convnext", "mamba2", "dit", "encoder_decoder", "deepseek_v3", "mixtral", "routed",
         "qwen3_moe", "gpt_oss", "unet", "clip")  # fmt: skip
KNOWN = (
    "beside experts",  # tp2 with ep: two axes already
    "takes several micro-batches, but",  # the loss mixes the whole batch, or batch norm does
    "multiply",  # the degrees and the devices
    "the FLOPs: it divides no size of",
    "cannot be obeyed:",
)
"""What a refusal says."""


def case_of(name: str) -> Prepared:
    return prepare_bundled(name) if name in TINY else prepare(name)


def planned(case: Prepared, force: str) -> PlanResult | str:
    """The plan, or the line that refuses it."""
    try:
        found = forced_plan(case, force)
    except AutoparError as error:
        assert "\n" not in str(error) and any(words in str(error) for words in KNOWN), f"{case.name}, {force}: {error}"
        return str(error)
    degrees = parse_force(force).degrees
    for axis in set(MODEL_AXES) & set(degrees):
        assert found.candidate.mesh.size_of(axis) == degrees[axis], f"{case.name}, {force}"
        assert whole_of_able(found, axis) <= 0.02, f"{case.name}, {force}"
    assert found.candidate.pipeline.stages == degrees.get("pp", 1), f"{case.name}, {force}"
    return found


def unequal(case: Prepared, plans: Sequence[tuple[str, PlanResult]], ranks: RankPool) -> list[str]:
    """What ranks compute otherwise than one process; plans of one world, each on its own so that one that fails is named."""
    wrong = []
    for force, plan in plans:
        job = program_text(plan.graph, plan.candidate), case.state, case.batch
        world = world_of(force)
        try:
            told = ranks.run(train_pipelines, [job], world=world, timeout=90.0 if world < 8 else 240.0)
        except RankError as error:
            wrong.append(f"{case.name}, {force}: {str(error)[-2000:]}")
            continue
        expected = case.expected
        state = expected.parameters | {key: each for key, each in expected.buffers.items() if key in case.state}
        for rank, ((outcome, _),) in enumerate(told):
            held = {key: each for key, each in (outcome.parameters | outcome.buffers).items() if key in state}
            wanted = Outcome(*expected[:2], {key: state[key] for key in held}, {})
            found = differences(Outcome(*outcome[:2], held, {}), wanted, 1e-9)
            wrong += [f"{case.name}, {force}, rank {rank}: {text}" for text in found]
    return wrong


def obeyed_and_equal(name: str, forces: Sequence[str], ranks: RankPool) -> None:
    case = case_of(name)
    found = {force: planned(case, force) for force in forces}
    plans = [(force, plan) for force, plan in found.items() if not isinstance(plan, str)]
    wrong = unequal(case, plans, ranks)
    refused = {force: said for force, said in found.items() if isinstance(said, str)}
    failed = {text.split(", rank ")[0].split(": ")[0] for text in wrong}
    print(f"\n{name}: {len(plans)} planned, {len(plans) - len(failed)} equal, {len(refused)} refused")
    for force, said in refused.items():
        print(f"  {force}: {said}")
    assert not wrong, "\n".join(wrong[:20])


def test_a_tiny_bundled_model(ranks: RankPool) -> None:
    obeyed_and_equal("mixtral-tiny", ("pp=2,ep=2", "dp=2,tp=2"), ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TINY, *SMALL])
def test_every_model(name: str, ranks: RankPool) -> None:
    obeyed_and_equal(name, FORCES, ranks)
