"""Pipelines with other features of a plan: recomputation, hybrid sharding, mixed precision, compiled blocks, dropout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from support.harness.end_to_end import prepare, prepare_dropout
from support.harness.rank_pool import RankPool
from support.harness.training_loop import graph_state
from support.harness.training_script import (
    Batch,
    Job,
    Record,
    Script,
    batches,
    check_jobs,
    on_one_process,
    on_ranks,
    record_differences,
    steps,
    three_steps,
)
from support.models.small_models import make
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_partition, with_replays
from support.plans.mesh import mesh_of
from support.plans.pipeline_plans import candidate_text
from torch import Tensor

from autopar.capture import capture
from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Graph
from autopar.ir.plan import Pipeline, Precision
from autopar.ir.verify import verify_candidate
from autopar.program.build import program_text

F64 = Precision("float64", "float64")
STAGE = Cluster.parse("local:2")


def replayed(
    name: str, pipeline: Pipeline, seed: int, many: int = 4, group: int = 0, whole: bool = False, zero: int = 0, **axes: int
) -> Job:
    """A random plan with random recomputation and offload; `whole`: all blocks are recomputed instead."""
    case = prepare(name, batch=16)
    plain = drawn_candidate(case.graph, mesh_of(**axes), seed, zero=zero, wild=0.0, precision=F64)
    plain = replace(plain, micro_batches=many, zero_group=group)
    if whole:
        made = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    else:
        made = with_replays(case.graph, plain, seed, share=(0.3, 0.6, 0.9, 1.0)[seed % 4])
    made = replace(made, pipeline=pipeline)
    verify_candidate(case.graph, made)
    title = f"{name} {seed} {pipeline.schedule} {pipeline.virtual} {many} {zero} {group} {whole} {axes}"
    return Job(title, candidate_text(case, made), case.state, steps(3), batches(case.batch), three_steps(name))


SPLIT = (Pipeline(2, 1, "zb-h1"), Pipeline(2, 2, "zbv"), Pipeline(2), Pipeline(2, 2, "dualpipev"))


@pytest.mark.slow
def test_recomputation(ranks: RankPool) -> None:
    check_jobs(
        [replayed(("gpt2", "llama")[seed % 2], SPLIT[seed % 4], seed, whole=seed in (2, 5), dp=1) for seed in range(7)], ranks, 2
    )


def in_parts(name: str, pipeline: Pipeline, seed: int, **axes: int) -> Job:
    """A plan that saves in parts all that each rank of tp has whole, received tensors too."""
    case = prepare(name, batch=16)
    plain = drawn_candidate(case.graph, mesh_of(**axes), seed, wild=0.0, precision=F64)
    made = replace(with_partition(case.graph, replace(plain, micro_batches=4), STAGE, "tp"), pipeline=pipeline)
    verify_candidate(case.graph, made)
    title, text = f"{name} {seed} {pipeline.schedule} in parts", candidate_text(case, made)
    assert "recompute.partition(" in text
    return Job(title, text, case.state, steps(3), batches(case.batch), three_steps(name))


@pytest.mark.parametrize("pipeline", [SPLIT[1], *(pytest.param(each, marks=pytest.mark.slow) for each in (SPLIT[0], SPLIT[2]))])
def test_tensors_in_parts(pipeline: Pipeline, ranks: RankPool) -> None:
    check_jobs([in_parts("gpt2", pipeline, 1, dp=1, tp=2)], ranks, 4)


@pytest.mark.slow
def test_recomputation_on_meshes(ranks: RankPool) -> None:
    jobs = [replayed("gpt2", SPLIT[zero % 4], zero, whole=zero % 2 == 1, zero=zero, dp=2) for zero in range(4)]
    check_jobs(
        [*jobs, replayed("llama", SPLIT[0], 3, dp=1, tp=2), replayed("gpt2", SPLIT[1], 8, dp=1, tp=2, whole=True)], ranks, 4
    )


@pytest.mark.slow
def test_recomputation_on_every_mesh(ranks: RankPool) -> None:
    jobs = [
        replayed(name, pipeline, seed, whole=whole, zero=zero, dp=2)
        for seed, (name, pipeline, whole, zero) in enumerate(product(("gpt2", "llama"), SPLIT, (True, False), range(4)))
    ]
    check_jobs(jobs, ranks, 4)


@pytest.mark.slow
def test_hybrid_sharding(ranks: RankPool) -> None:
    """Four data ranks that share two copies of the state."""
    check_jobs(
        [
            replayed("gpt2", SPLIT[zero % 4], zero, whole=zero == 2, zero=zero, group=2 if zero != 2 else 1, dp=4)
            for zero in (1, 2, 3)
        ]
        + [replayed("llama", SPLIT[0], 5, zero=3, group=2, many=2, dp=4)],
        ranks,
        8,
    )


@cache
def low(name: str) -> tuple[Graph, dict[str, Tensor], Batch, Record]:
    """Captured for bfloat16 over float32, and three steps in float32 on one process."""
    model, batch = make(name, torch.float32, 16)
    graph = capture(model, (), batch, compute_dtype="bfloat16")
    return graph, graph_state(graph, model), batch, on_one_process(model, steps(3), batches(batch))


def half(
    name: str, pipeline: Pipeline, whole: bool, zero: int
) -> tuple[str, dict[str, Tensor], Script, list[Batch], dict[str, Any]]:
    """A job of two data ranks."""
    graph, state, batch, _ = low(name)
    plain = drawn_candidate(graph, mesh_of(dp=2), 0, zero=zero, wild=0.0, precision=Precision("bfloat16", "float32"))
    blocks = tuple(replace(block, recompute=whole) for block in plain.blocks)
    text = program_text(graph, replace(plain, blocks=blocks, micro_batches=4, pipeline=pipeline))
    return text, state, steps(3), batches(batch), {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_mixed_precision(name: str, ranks: RankPool) -> None:
    """Near float32 on one process; ways to shard the state and schedules differ only in the order of sums."""
    ways = ((Pipeline(2), False), (Pipeline(2, 1, "zb-h1"), True), (Pipeline(2, 2, "zbv"), False))
    expected = low(name)[-1]
    jobs = [half(name, pipeline, whole, zero) for pipeline, whole in ways for zero in range(4)]
    told = ranks.run(on_ranks, jobs, world=4, timeout=200)
    for mine in told:
        for found in mine:
            assert found[0] == pytest.approx(expected[0], rel=3e-2)
            assert {str(tensor.dtype) for tensor in found[1][0].values()} == {"torch.float32"}
            gradients = (Record(found.numbers[:1], each.gradients[:1], {}) for each in (found, expected))
            assert not record_differences(*gradients, 5e-2)
            assert not record_differences(found, mine[0], 1e-3)
    assert told[0][0][0] != pytest.approx(expected[0], rel=1e-5)


def compiled(name: str, pipeline: Pipeline, zero: int) -> Job:
    """What torch.compile makes of each block."""
    case = prepare(name, batch=16)
    plain = drawn_candidate(case.graph, mesh_of(dp=2), 0, zero=zero, wild=0.0, precision=F64)
    text = candidate_text(case, replace(plain, micro_batches=4, pipeline=pipeline))
    title, options = f"{name} {pipeline.schedule} {zero} compiled", {"compile": "aot_eager"}
    return Job(title, text, case.state, steps(3), batches(case.batch), three_steps(name), options)


@pytest.mark.slow
def test_compiled(ranks: RankPool) -> None:
    check_jobs(
        [
            compiled("gpt2", Pipeline(2), 3),
            compiled("llama", Pipeline(2, 1, "zb-h1"), 0),
            compiled("gpt2", Pipeline(2, 2, "zbv"), 3),
        ],
        ranks,
        4,
    )


def dropped(pipeline: Pipeline, zero: int = 0, recompute: str = "", many: int = 4, **axes: int) -> tuple[Any, ...]:
    """Two steps of GPT-2 with dropout, and an evaluation."""
    case = prepare_dropout()
    plain = drawn_candidate(case.graph, mesh_of(**axes), 1, zero=zero, wild=0.0, precision=F64)
    plain = replace(plain, micro_batches=many)
    if recompute == "whole":
        plain = replace(plain, blocks=tuple(replace(block, recompute=True) for block in plain.blocks))
    elif recompute:
        plain = with_replays(case.graph, plain, 0, 1.0)
    text = candidate_text(case, replace(plain, pipeline=pipeline))
    look = [("train", False), ("look", 0), ("train", True)]
    return text, case.state, [*steps(2), *look], batches(case.batch), {}


@pytest.mark.slow
def test_dropout(ranks: RankPool) -> None:
    """What is recomputed draws the masks of before; so do ways to shard, and split backwards; tensor ranks draw alike."""
    ways = (("1f1b", "", 0), ("1f1b", "whole", 3), ("zb-h1", "", 1), ("zb-h1", "whole", 2), ("zb-h1", "some", 3))
    for axes in ({"dp": 2}, {"dp": 1, "tp": 2}):
        jobs = [
            dropped(Pipeline(2, 1, schedule), recompute=recompute, zero=zero if axes["dp"] > 1 else 0, **axes)
            for schedule, recompute, zero in ways
        ]
        told = ranks.run(on_ranks, jobs, world=4, timeout=200)
        for mine in told:
            for index, found in enumerate(mine):
                assert not record_differences(found, told[0][0]), (axes, index)
