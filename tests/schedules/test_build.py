"""Builders against the action tables of torch.distributed.pipelining, and what papers say of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.ir.plan import Pipeline
from autopar.ir.schedule import Schedule
from autopar.schedules.check import check
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import builder_named, schedule_names, schedule_of, stage_of_chunks


def torchs(name: str, stages: int, virtual: int, micro_batches: int) -> str:
    """The table of torch's class, overlapped pairs flattened, without its gaps."""
    from torch.distributed.pipelining import schedules

    groups = max(1, micro_batches // stages)
    fake = SimpleNamespace(
        pp_group_size=stages,
        n_local_stages=virtual,
        num_stages=stages * virtual,
        _num_stages=stages * virtual,
        _n_microbatches=micro_batches,
        number_of_rounds=groups,
        microbatches_per_round=micro_batches // groups,
    )
    lines = []
    for rank in range(stages):
        cells: list[Any] = getattr(schedules, name)._calculate_single_rank_operations(fake, rank)
        flat = [each for cell in cells if cell is not None for each in (cell.sub_actions or (cell,))]
        lines.append(" ".join(map(str, flat)))
    return "\n".join(lines)


def groups_go_up(stages: int, micro_batches: int) -> bool:
    return micro_batches % max(1, micro_batches // stages) == 0


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("micro", [1, 2, 3, 4, 6, 8, 10, 15, 16, 24])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_tables_are_torchs(stages: int, micro: int, virtual: int) -> None:
    def built(name: str) -> str:
        return str(schedule_of(Pipeline(stages, virtual, name), micro))

    if groups_go_up(stages, micro):
        if virtual > 1:
            assert built("1f1b") == torchs("ScheduleInterleaved1F1B", stages, virtual, micro)
        assert built("zb-h1") == torchs("ScheduleInterleavedZeroBubble", stages, virtual, micro)
    if virtual == 2:
        assert built("zbv") == torchs("ScheduleZBVZeroBubble", stages, virtual, micro)
        if micro >= 2 * stages:
            assert built("dualpipev") == torchs("ScheduleDualPipeV", stages, virtual, micro)


def test_plain_1f1b_is_the_papers() -> None:
    """arXiv 2104.04473, figure 4 (top), first and last device."""
    lines = str(schedule_of(Pipeline(4), 8)).splitlines()
    assert lines[0] == "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"
    assert lines[3] == "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7"
    assert str(schedule_of(Pipeline(2, 2, "naive"), 2)).splitlines()[0] == "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1"
    assert str(schedule_of(Pipeline(2, 2, "gpipe"), 2)).splitlines()[1] == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def pipelines(stages: int) -> list[Pipeline]:
    return [Pipeline(stages, v, name) for name in schedule_names() for v in ((2,) if builder_named(name).v_shaped else (1, 2, 3))]


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_schedule_runs(stages: int) -> None:
    for pipeline in pipelines(stages):
        for micro in range(1, 4 * stages + 3):
            if pipeline.schedule == "dualpipev" and micro < 2 * stages:
                with pytest.raises(PlanError, match=f"takes at least {2 * stages} micro-batches"):
                    schedule_of(pipeline, micro)
                continue
            schedule = schedule_of(pipeline, micro)
            check(schedule)
            assert schedule.rank_of == stage_of_chunks(pipeline)
            assert (schedule.micro_batches, schedule.chunks) == (micro, stages * pipeline.virtual)
            assert schedule.splits_backward == builder_named(pipeline.schedule).splits_backward
            assert schedule.splits_backward == (pipeline.schedule in ("zb-h1", "zbv", "dualpipev"))
            again = Schedule.parse(str(schedule), schedule.name)
            assert again == schedule
            told = Pipeline(stages, pipeline.virtual, "told", actions=str(schedule))
            assert schedule_of(told, micro).ranks == schedule.ranks and stage_of_chunks(told) == stage_of_chunks(pipeline)


def makespan(pipeline: Pipeline, micro: int, chunk: ChunkSeconds) -> float:
    clock = ScheduleClock.of(schedule_of(pipeline, micro))
    return max(rank.end_seconds for rank in clock.run([chunk] * (pipeline.stages * pipeline.virtual)))


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_bubbles_are_the_papers(stages: int) -> None:
    """arXiv 2401.10241, table 2, with T_F = T_B = T_W = 1: 1F1B (p - 1) (T_F + T_B + T_W), ZB-H1 (p - 1) (T_F + T_B - T_W). Its
    V-schedule only waits for the first micro-batch: p - 1 forwards of a chunk (of half the size)."""
    one, micro = ChunkSeconds(1.0, 2.0), 4 * stages
    assert makespan(Pipeline(stages, 1, "1f1b"), micro, one) == 3 * micro + 3 * (stages - 1)
    assert makespan(Pipeline(stages, 1, "zb-h1"), micro, one) == 3 * micro + stages - 1
    assert makespan(Pipeline(stages, 2, "zbv"), micro, one) == 6 * micro + stages - 1
    assert makespan(Pipeline(stages, 1, "naive"), micro, one) == 3 * micro * stages


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_held_is_the_papers(stages: int) -> None:
    """arXiv 2401.10241, table 2 (p M_B for 1F1B, ZB-H1 and ZB-V, whose pairs are half as large); 2412.19437, table 2 (p + 1
    for DualPipe: DualPipeV's ranks hold two chunks of half the size)."""
    micro = 4 * stages
    assert max(check(schedule_of(Pipeline(stages), micro))) == stages
    assert set(check(schedule_of(Pipeline(stages, 1, "zb-h1"), micro))) == {stages}
    assert set(check(schedule_of(Pipeline(stages, 2, "zbv"), micro))) == {2 * stages}
    assert max(check(schedule_of(Pipeline(stages, 2, "dualpipev"), micro))) == 2 * stages + 1
    assert check(schedule_of(Pipeline(stages, 1, "gpipe"), micro)) == (micro,) * stages
    assert check(schedule_of(Pipeline(stages, 1, "naive"), micro)) == (1,) * stages


def test_what_there_is_not() -> None:
    for pipeline, micro, said in [
        (Pipeline(4, 1, "zigzag"), 8, "no schedule 'zigzag': write naive, gpipe, "),
        (Pipeline(4, 1, "zbv"), 8, "2 chunks a stage, not 1"),
        (Pipeline(4, 3, "dualpipev"), 8, "2 chunks a stage, not 3"),
        (Pipeline(4), 0, "each is 1 or more"),
        (Pipeline(2, 1, "told", actions="0F0 0B0\n1F0 1B0"), 2, "2 ranks, 2 chunks and 1 micro-batches, the pipeline 2, 2 and 2"),
    ]:
        with pytest.raises(PlanError, match=said):
            schedule_of(pipeline, micro)
