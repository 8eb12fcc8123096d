"""Pipelines under unusual training loops, with unusual schedules, and with stages that have no parameters."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.training_script import Job, Record, Script, batches, check_jobs, on_one_process, steps, three_steps
from support.models.small_models import make
from support.plans.pipeline_plans import candidate_text, pipeline_candidate, with_split_block

from autopar.ir.plan import Pipeline
from autopar.verification.single import LiftCasts

LOOPS: dict[str, Script] = {
    "accumulated": [
        ("zero", True),
        ("loss", 0, 0, 0.5),
        ("backward", 0),
        ("loss", 1, 1, 0.5),
        ("backward", 1),
        ("gradients",),
        ("step",),
        ("zero", False),
        ("loss", 0, 2, 0.5),
        ("loss", 1, 3, 2.0),
        ("backward", 1),
        ("backward", 0),
        ("gradients",),
        ("step",),
    ],
    "zeroed": [
        ("loss", 0, 0, 1.0),
        ("backward", 0),
        ("step",),
        ("zero", False),
        ("loss", 0, 1, 1.0),
        ("backward", 0),
        ("gradients",),
        ("step",),
        *steps(1, 2),
    ],
    "clipped": [
        ("loss", 0, 0, 1.0),
        ("backward", 0),
        ("clip", 0.1, 2.0),
        ("gradients",),
        ("step",),
        ("zero", True),
        ("loss", 0, 1, 1.0),
        ("backward", 0),
        ("clip", 0.01, float("inf")),
        ("gradients",),
        ("clip", 1e-3, 1.0),
        ("step",),
    ],
    "looked": [
        ("look", 0),
        *steps(1),
        ("look", 1),
        ("look", 1),
        ("train", False),
        ("look", 0),
        ("train", True),
        *steps(1, 1),
        ("loss", 0, 2, 1.0),
        ("look", 3),
        ("backward", 0),
        ("gradients",),
        ("step",),
        ("look", 0),
    ],
}


@cache
def by_one(name: str, loop: str) -> Record:
    model, batch = make(name, torch.float64, 16)
    with LiftCasts():
        return on_one_process(model, LOOPS[loop], batches(batch))


def looped(name: str, loop: str, pipeline: Pipeline, many: int = 4, **force: int) -> Job:
    case = prepare(name, batch=16)
    text = candidate_text(case, pipeline_candidate(case, force, pipeline, many))
    title = f"{name} {loop} {pipeline.schedule} {pipeline.virtual} {force}"
    return Job(title, text, case.state, LOOPS[loop], batches(case.batch), by_one(name, loop))


@pytest.mark.slow
def test_loops(ranks: RankPool) -> None:
    check_jobs(
        [
            looped("gpt2", loop, pipeline)
            for loop, pipeline in zip(
                LOOPS, (Pipeline(2), Pipeline(2, 2, "zbv"), Pipeline(2), Pipeline(2, 1, "zb-h1")), strict=True
            )
        ],
        ranks,
        2,
    )


@pytest.mark.slow
def test_loops_with_data(ranks: RankPool) -> None:
    check_jobs(
        [
            looped(
                "gpt2", loop, Pipeline(2, 2, "zbv") if zero % 2 else Pipeline(2, 1, "zb-h1" if zero else "1f1b"), dp=2, zero=zero
            )
            for zero, loop in enumerate(LOOPS)
        ],
        ranks,
        4,
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("zero", range(4))
def test_every_loop_with_data(loop: str, zero: int, ranks: RankPool) -> None:
    pipelines = (Pipeline(2), Pipeline(2, 2), Pipeline(2, 1, "zb-h1"), Pipeline(2, 2, "zbv"))
    check_jobs([looped("gpt2", loop, pipeline, dp=2, zero=zero) for pipeline in pipelines], ranks, 4)


def counted(name: str, pipeline: Pipeline, many: int, **force: int) -> Job:
    """Three steps in some number of micro-batches."""
    case = prepare(name, batch=16)
    candidate = pipeline_candidate(case, force, pipeline, many)
    return Job(
        f"{name} {pipeline} {many} {force}",
        candidate_text(case, candidate),
        case.state,
        steps(3),
        batches(case.batch),
        three_steps(name),
    )


BACKWARDS = """0F1 0F0 0F3 0F2 0B2 0B3 0I0 0I1 0W1 0W0
1F1 1F0 1F3 1F2 1B2 1I3 1B0 1I1 1W3 1W1"""
CROSSED = """1F0 2F0 1F1 2F1 2I0 1I0 2B1 1B1 1W0 2W0
0F0 3F0 0F1 3F1 3B0 0I0 3I1 0W0 3W1 0B1"""
"""Chunks in an order that no builder makes: the first and last ones on the second rank."""
HALVES = """0F0 2F0 0F1 2F1 2B1 2B0 0B1 0B0
1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"""


def test_odd_schedules(ranks: RankPool) -> None:
    check_jobs(
        [
            counted("gpt2", Pipeline(2, 1, "backwards", actions=BACKWARDS), 4),
            counted("gpt2", Pipeline(2, 2, "crossed", actions=CROSSED), 2),
            counted("llama", Pipeline(2, 2, "halves", actions=HALVES), 2),
            counted("gpt2", Pipeline(2, cuts=(3,)), 1),
            counted("gpt2", Pipeline(2, 1, "zb-h1", cuts=(1,)), 16),
            counted("llama", Pipeline(2, 2, "zbv"), 1),
            counted("llama", Pipeline(2, 1, "zb-h1"), 2),
            counted("encoder_decoder", Pipeline(2, 2, "1f1b", cuts=(1, 3, 5)), 1),
            counted("encoder_decoder", Pipeline(2, 2, "zbv", cuts=(2, 3, 4)), 4),
        ],
        ranks,
        2,
    )


@pytest.mark.slow
def test_odd_schedules_with_data(ranks: RankPool) -> None:
    check_jobs(
        [
            counted("gpt2", Pipeline(2, 1, "backwards", actions=BACKWARDS), 4, dp=2, zero=3),
            *(counted("gpt2", Pipeline(2, 2, "crossed", actions=CROSSED), 2, dp=2, zero=zero) for zero in range(4)),
            counted("gpt2", Pipeline(4, cuts=(1, 2, 3)), 3 + 1, tp=1),
            counted("gpt2", Pipeline(2), 1, dp=2, zero=2),
            counted("llama", Pipeline(2, 2, "zbv"), 1, dp=2, zero=3),
            counted("llama", Pipeline(2, 1, "zb-h1"), 2, dp=2, zero=1),
        ],
        ranks,
        4,
    )


def thin(name: str, places: tuple[int, ...], pipeline: Pipeline, **force: int) -> Job:
    """One block divided: a last chunk that only divides, or a first one without parameters."""
    case = with_split_block(prepare(name, batch=16), "Main", places)
    text = candidate_text(case, pipeline_candidate(case, force, pipeline, 4))
    return Job(f"{name} {places} {force}", text, case.state, LOOPS["clipped"], batches(case.batch), by_one(name, "clipped"))


@pytest.mark.slow
def test_stages_without_parameters(ranks: RankPool) -> None:
    check_jobs(
        [
            thin("mlp", (6,), Pipeline(2)),
            thin("mlp", (5,), Pipeline(2, 1, "zb-h1")),
            thin("convnet", (8,), Pipeline(2, 1, "gpipe")),
            thin("mlp", (1, 2, 6), Pipeline(2, 2, "zbv")),
            thin("convnet", (1, 3, 8), Pipeline(2, 2)),
        ],
        ranks,
        2,
    )


def test_stages_without_parameters_with_data(ranks: RankPool) -> None:
    check_jobs(
        [thin(("mlp", "convnet")[zero % 2], (6 + 2 * (zero % 2),), Pipeline(2, 1, "zb-h1"), dp=2, zero=zero) for zero in range(4)]
        + [
            thin("mlp", (1, 2, 6), Pipeline(4), tp=1),
            thin("mlp", (1, 2, 5), Pipeline(2, 2, "zbv"), dp=2, zero=3),
            thin("mlp", (3,), Pipeline(2), tp=2),
        ],
        ranks,
        4,
    )
