"""Schedules beside each other, as a table: `python tests/benchmarks/bench_schedules.py [--stages 8] [--micro-batches 16]`.

A stage of the even case takes 1 for a forward, 1.05 for the gradients of the inputs, 0.95 for those of the weights, saves 1 of a
micro-batch until the first, and half of it until the second. All schedules of a case have the same layers and the same memory
limit: that of 1F1B, p micro-batches of a whole stage, or half of that. With two chunks a rank each has half a stage. Sends take
0.05 and overlap with the computation. Schedules that exceed the limit are in brackets.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.pipeline_schedule import schedule_of, stage_of_chunks
from autopar.schedules.synthesis.task import MemoryLimits, Task
from autopar.solve.pipeline.synthesize import synthesize

FORWARD, INPUTS, WEIGHTS, SEND = 1.0, 1.05, 0.95, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """`first`, `last`: what the embedding and the head add to their stages (parts of one); `memory_limit`: in micro-batches."""

    name: str
    first: float
    last: float
    memory_limit: float

    def chunks(self, stages: int, virtual: int) -> list[ChunkSeconds]:
        sizes = [1 / virtual] * (stages * virtual)
        sizes[0] += self.first
        sizes[-1] += self.last
        return [
            ChunkSeconds(FORWARD * size, (INPUTS + WEIGHTS) * size, input_backward=INPUTS * size, weight_backward=WEIGHTS * size)
            for size in sizes
        ]

    def limits(self, stages: int, virtual: int) -> MemoryLimits:
        many = stages * virtual
        return MemoryLimits((1 / virtual,) * many, (self.memory_limit,) * stages, (0.5 / virtual,) * many)


def cases(stages: int) -> tuple[Case, ...]:
    return (
        Case("even", 0.0, 0.0, stages),
        Case("head", 0.0, 0.6, stages),
        Case("embedding", 0.5, 0.0, stages),
        Case("embedding and head", 0.2, 0.4, stages),
        Case("even, half the memory", 0.0, 0.0, stages / 2),
        Case("head, half the memory", 0.0, 0.6, stages / 2),
    )


def built(case: Case, pipeline: Pipeline, micro_batches: int) -> str:
    stages, virtual = pipeline.stages, pipeline.virtual
    chunks = case.chunks(stages, virtual)
    try:
        schedule = schedule_of(pipeline, micro_batches)
    except AutoparError:
        return "-"
    ranks = ScheduleClock.of(schedule).run(chunks, [SEND] * (len(chunks) - 1))
    end, busy = max(rank.end_seconds for rank in ranks), sum(rank.busy_seconds for rank in ranks)
    task = Task.of(chunks, schedule.rank_of, micro_batches, memory=case.limits(stages, virtual), split=schedule.splits_backward)
    said = f"{end:.1f}, {1 - busy / end / stages:.0%}"
    return said if all(task.fits(actions, rank) for rank, actions in enumerate(schedule.ranks)) else f"({said})"


def found(case: Case, pipeline: Pipeline, micro_batches: int, split: bool, seconds: float) -> str:
    stages, virtual = pipeline.stages, pipeline.virtual
    chunks = case.chunks(stages, virtual)
    began = time.monotonic()
    made = synthesize(
        chunks,
        stage_of_chunks(pipeline),
        micro_batches,
        [SEND] * (len(chunks) - 1),
        memory=case.limits(stages, virtual),
        split_backward=split,
        effort=0.6 * seconds,
    )
    ranks = ScheduleClock.of(made.schedule).run(chunks, [SEND] * (len(chunks) - 1))
    busy = sum(rank.busy_seconds for rank in ranks)
    gap = "optimal" if made.status == "OPTIMAL" else f"gap {made.gap:.1%}"
    bubble, took = 1 - busy / made.makespan_seconds / stages, time.monotonic() - began
    return f"**{made.makespan_seconds:.1f}**, {bubble:.0%}, {gap}, {took:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each synthesis")
    arguments = parser.parse_args()
    p, m = arguments.stages, arguments.micro_batches
    columns = cases(p)
    print(f"| {p} stages, {m} micro-batches: time, bubble | " + " | ".join(case.name for case in columns) + " |", flush=True)
    print("|---|" + "---|" * len(columns))
    rows = [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("1f1b", 2), ("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]
    for name, virtual in rows:
        said = f"{name}, {virtual} chunks" if name == "1f1b" and virtual > 1 else name
        print(f"| {said} | " + " | ".join(built(case, Pipeline(p, virtual, name), m) for case in columns) + " |", flush=True)
    for said, pipeline, split in [
        ("synthesized, whole backward", Pipeline(p), False),
        ("synthesized", Pipeline(p), True),
        ("synthesized, 2 chunks", Pipeline(p, 2), True),
        ("synthesized, 2 chunks in a V", Pipeline(p, 2, "zbv"), True),
    ]:
        print(
            f"| {said} | " + " | ".join(found(case, pipeline, m, split, arguments.seconds) for case in columns) + " |", flush=True
        )


if __name__ == "__main__":
    main()
