"""Pipelines on real processes: loss, every gradient, and parameters after three steps are those of one process; and every stage
ran the actions of the plan in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
from support.harness.comparison import Outcome, differences
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.plans.forced_plans import forced_plan, whole_of_able
from support.plans.pipeline_plans import candidate_text, pipeline_candidate, scheduled_actions, with_split_block

from autopar.ir.plan import Candidate, Pipeline

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev")
TWICE = ("interleaved", "zbv", "dualpipev")
"""Schedules of two chunks a stage."""
MODELS = ("gpt2", "llama", "bert", "encoder_decoder", "convnet")


@dataclass(frozen=True, slots=True)
class Run:
    """A model on a schedule; `mesh` is that of one stage."""

    model: str
    schedule: str
    stages: int
    mesh: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.model, self.schedule, f"pp={self.stages}", *(f"{name}={size}" for name, size in self.mesh)])

    @property
    def pipeline(self) -> Pipeline:
        name = "1f1b" if self.schedule == "interleaved" else self.schedule
        return Pipeline(self.stages, 2 if self.schedule in TWICE else 1, name)

    @property
    def force(self) -> str:
        """As users ask for it."""
        return ",".join([f"pp={self.stages}", *(f"{name}={size}" for name, size in self.mesh), f"schedule={self.schedule}"])

    @property
    def micro_batches(self) -> int:
        return 2 * self.stages if self.schedule == "dualpipev" else 4

    @property
    def world(self) -> int:
        size = self.stages
        for name, count in self.mesh:
            size *= count if name in ("dp", "tp") else 1
        return size


@cache
def prepared(model: str, chunks: int) -> Prepared:
    """Deep enough for so many chunks."""
    if model == "convnet":
        return with_split_block(prepare("convnet", batch=16), "Main", {2: (3,), 4: (2, 3, 6)}[chunks])
    return prepare("gpt2_deep" if model == "gpt2" and chunks > 4 else model, batch=16)


def check(runs: list[Run], ranks: RankPool) -> None:
    """All on one pool of processes; plans of the mesh of one stage, put on a schedule."""
    made = []
    for run in runs:
        pipeline = run.pipeline
        case = prepared(run.model, pipeline.stages * pipeline.virtual)
        made.append((run, case, pipeline_candidate(case, dict(run.mesh), pipeline, run.micro_batches)))
    _check(made, ranks)


def check_forced(runs: list[Run], ranks: RankPool) -> None:
    """The same, planned by force: every model axis is obeyed, and the schedule is the one that was asked for."""
    made = []
    for run in runs:
        case = prepare(run.model)
        found = forced_plan(case, run.force)
        assert whole_of_able(found, "tp") <= 0.02, run
        assert found.candidate.pipeline.schedule == run.pipeline.schedule, run
        assert dict(run.mesh).items() <= {"zero": dict(run.mesh).get("zero"), **dict(_sizes(found.candidate))}.items(), run
        made.append((run, replace(case, graph=found.graph), found.candidate))
    _check(made, ranks)


def _sizes(candidate: Candidate) -> list[tuple[str, int]]:
    return [(axis.name, axis.size) for axis in candidate.mesh.axes]


def _check(made: list[tuple[Run, Prepared, Candidate]], ranks: RankPool) -> None:
    runs = [run for run, _, _ in made]
    jobs = [(candidate_text(case, candidate), case.state, case.batch) for _, case, candidate in made]
    patience = 60.0 + (10 if runs[0].world < 8 else 120) * len(jobs)  # eight processes on two cores take their time
    found = ranks.run(train_pipelines, jobs, world=runs[0].world, timeout=patience)
    wrong = []
    for index, (run, case, candidate) in enumerate(made):
        expected = case.expected
        state = expected.parameters | {name: tensor for name, tensor in expected.buffers.items() if name in case.state}
        orders = scheduled_actions(candidate)
        for rank, results in enumerate(found):
            outcome, trace = results[index]
            whole = outcome.parameters | outcome.buffers
            found_state = {name: tensor for name, tensor in whole.items() if name in state}
            wanted_state = {name: state[name] for name in found_state}
            wrong += [f"{run}, rank {rank}: {text}" for text in differences(
                Outcome(*outcome[:2], found_state, {}), Outcome(*expected[:2], wanted_state, {}), 1e-9)]  # fmt: skip
            if list(trace) != orders[rank // (len(found) // run.stages)]:
                wrong.append(f"{run}, rank {rank} ran {' '.join(trace)}")
    assert not wrong, "\n".join(wrong[:20])


def test_two_stages(ranks: RankPool) -> None:
    check([Run(MODELS[number % 5], schedule, 2) for number, schedule in enumerate(SCHEDULES[:5])]
          + [Run("llama", "zbv", 2), Run("bert", "dualpipev", 2), Run("encoder_decoder", "zb-h1", 2)], ranks)  # fmt: skip


def test_four_stages(ranks: RankPool) -> None:
    check([Run("encoder_decoder", "1f1b", 4), Run("convnet", "zb-h1", 4), Run("gpt2", "interleaved", 4), Run("gpt2", "zbv", 4),
           Run("gpt2", "dualpipev", 4), Run("llama", "gpipe", 4)], ranks)  # fmt: skip


def test_stages_of_two(ranks: RankPool) -> None:
    """With tensor parallelism in the stage, and with data parallelism and each way to shard the state."""
    check([Run("gpt2", "1f1b", 2, (("tp", 2),)), Run("llama", "zb-h1", 2, (("tp", 2),)), Run("gpt2", "zbv", 2, (("dp", 2),)),
           *(Run("gpt2", "1f1b", 2, (("dp", 2), ("zero", zero))) for zero in (1, 2, 3)),
           *(Run("llama", "zb-h1", 2, (("dp", 2), ("zero", zero))) for zero in (1, 2, 3))], ranks)  # fmt: skip


def test_three_axes(ranks: RankPool) -> None:
    check_forced([Run("gpt2", "zbv", 2, (("dp", 2), ("tp", 2), ("zero", 3))),
           Run("llama", "interleaved", 2, (("dp", 2), ("tp", 2), ("zero", 1)))], ranks)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stages", [2, 4])
def test_every_schedule(model: str, stages: int, ranks: RankPool) -> None:
    deep = model == "gpt2" or stages == 2
    check([Run(model, schedule, stages) for schedule in SCHEDULES if deep or schedule not in TWICE], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mesh", [(("tp", 2),), *((("dp", 2), ("zero", zero)) for zero in range(4))], ids=str)
def test_every_mesh(model: str, mesh: tuple[tuple[str, int], ...], ranks: RankPool) -> None:
    check([Run(model, schedule, 2, mesh) for schedule in SCHEDULES if model != "convnet" or schedule not in TWICE], ranks)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", range(4))
def test_every_model_on_three_axes(model: str, zero: int, ranks: RankPool) -> None:
    mesh = (("dp", 2), ("tp", 2), ("zero", zero))
    check_forced([Run(model, schedule, 2, mesh) for schedule in ("1f1b", "zb-h1", "zbv", "interleaved", "dualpipev")], ranks)
