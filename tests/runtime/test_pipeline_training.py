"""Programs in pipeline stages, written by hand, train like one process: schedules, state shardings, axes in a stage."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.harness.comparison import Outcome
from support.harness.end_to_end import reference
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.models.handwritten_pipeline import batch, built_schedule, gpipe_schedule, model, pipeline_differences, pipeline_text
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from autopar.runtime.pipeline.executor import StepState

V_SHAPED = ((0, 3), (1, 2))


@lru_cache(maxsize=1)
def expected() -> tuple[dict[str, torch.Tensor], Outcome]:
    """The state that all start from (without the second name of the tied table), and what one process makes of it."""
    one = model()
    state = {name: tensor.clone() for name, tensor in one.state_dict().items() if name != "head.weight"}
    return state, reference(one, batch(), lift=False)


def check(ranks: RankPool, programs: dict[str, str], world: int, compile: str = "", timeout: float = 120.0) -> None:
    """All cases with one start of the processes."""
    state, outcome = expected()
    cases = [(program, state, batch()) for program in programs.values()]
    found = ranks.run(train_pipelines, cases, compile=compile, world=world, timeout=timeout)
    bad = {name: pipeline_differences(found, program, index, outcome) for index, (name, program) in enumerate(programs.items())}
    assert not any(bad.values()), {name: lines[:4] for name, lines in bad.items() if lines}


def test_two_stages(ranks: RankPool) -> None:
    """Each builder, V-shapes with chunks that hand over on one rank among them, and chunks of one rank alone."""
    names = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]
    programs = {f"{name} {virtual}": pipeline_text(built_schedule(name, 2, 4, virtual), 4) for name, virtual in names}
    programs["a V in any order"] = pipeline_text(gpipe_schedule(V_SHAPED, 2), 2)
    programs["one rank"] = pipeline_text(gpipe_schedule(((0, 1),), 2, split=True), 2, dp=2)
    programs["recomputed"] = pipeline_text(built_schedule("zbv", 2, 4, 2), 4, recompute=True)
    programs["one micro-batch"] = pipeline_text(built_schedule("1f1b", 2, 1), 1)
    check(ranks, programs, 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_of_a_stage(zero: int, ranks: RankPool) -> None:
    """On the data axis, with and without what the schedule says of it, and with halves of backwards."""
    programs = {}
    for name, virtual in [("1f1b", 1), ("1f1b", 2), ("zbv", 2)]:
        programs[name, virtual, "told"] = pipeline_text(built_schedule(name, 2, 2, virtual, zero), 2, zero=zero, dp=2)
    programs["untold"] = pipeline_text(built_schedule("zb-h1", 2, 4), 4, zero=zero, dp=2)
    programs["recomputed"] = pipeline_text(built_schedule("zb-h1", 2, 2, 1, zero), 2, zero=zero, dp=2, recompute=True)
    check(ranks, {str(name): program for name, program in programs.items()}, 4)


def actions_and_waits(text: str, state: dict[str, torch.Tensor]) -> list[str]:
    """On a rank: the actions of two steps, and where FSDP2 waits for its reductions."""
    happened: list[str] = []
    run, wait = StepState.run_action, FSDPParamGroup.finalize_backward

    def run_action(step: StepState, action: Any) -> None:
        happened.append(action.kind)
        run(step, action)

    def finalize(group: FSDPParamGroup) -> None:
        happened.append("wait")
        wait(group)

    with patch.object(StepState, "run_action", run_action), patch.object(FSDPParamGroup, "finalize_backward", finalize):
        train_pipelines([(text, state, batch())], steps=2)
    return happened


@pytest.mark.parametrize("zero", [1, 2])
def test_reductions_run_beside_the_backwards_of_other_chunks(zero: int, ranks: RankPool) -> None:
    """A step waits for them once, when all of its backwards are done."""
    text = pipeline_text(built_schedule("1f1b", 2, 2, 2, zero), 2, zero=zero, dp=2)
    for happened in ranks.run(actions_and_waits, text, expected()[0], world=4):
        runs = [kind for kind, _ in groupby(happened, lambda kind: kind == "wait")]
        assert runs == [False, True] * 2, happened


def test_four_stages_and_a_tensor_axis(ranks: RankPool) -> None:
    programs = {
        "four": pipeline_text(built_schedule("1f1b", 4, 4), 4),
        "four, halves": pipeline_text(built_schedule("zb-h1", 4, 4), 4),
        "tensor": pipeline_text(built_schedule("1f1b", 2, 4), 4, tp=2),
        "tensor, halves": pipeline_text(built_schedule("zbv", 2, 4, 2), 4, tp=2),
    }
    check(ranks, programs, 4)


def three_axes() -> dict[str, str]:
    programs: dict[Any, str] = {}
    for zero in (0, 1, 3):
        programs["3-D", zero] = pipeline_text(built_schedule("zbv", 2, 2, 2, zero), 2, zero=zero, dp=2, tp=2)
        programs["3-D, 1f1b", zero] = pipeline_text(built_schedule("1f1b", 2, 4, 1, zero), 4, zero=zero, dp=2, tp=2)
        programs["copies", zero] = pipeline_text(built_schedule("zb-h1", 2, 2, 1, zero), 2, zero=zero, group=2, dp=4)
    return {str(name): program for name, program in programs.items()}


@pytest.mark.slow
def test_three_axes(ranks: RankPool) -> None:
    every = three_axes()
    check(ranks, {name: every[name] for name in ("('3-D', 3)", "('copies', 3)", "('3-D, 1f1b', 1)")}, 8)


@pytest.mark.slow
def test_the_whole_matrix(ranks: RankPool) -> None:
    check(ranks, three_axes(), 8, timeout=300)
    programs = {}
    for zero in (0, 1, 2, 3):
        for name, virtual in [("naive", 1), ("gpipe", 1), ("zb-h1", 2), ("dualpipev", 2)]:
            for recompute in (False, True):
                lines = built_schedule(name, 2, 4, virtual, zero)
                programs[f"{name} {virtual} {zero} {recompute}"] = pipeline_text(lines, 4, zero=zero, dp=2, recompute=recompute)
    check(ranks, programs, 4, timeout=300)
