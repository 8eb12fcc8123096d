"""Stages that sleep: what schedules take on real processes is what their clock says, and so they rank alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool

from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ChunkSeconds, ScheduleClock
from autopar.schedules.communicate import with_communication
from autopar.schedules.pipeline_schedule import schedule_of

MANY = 8
SCHEDULES = {
    "naive": Pipeline(4, 1, "naive"),
    "gpipe": Pipeline(4, 1, "gpipe"),
    "1f1b": Pipeline(4),
    "interleaved": Pipeline(4, 2),
    "zb-h1": Pipeline(4, 1, "zb-h1"),
    "zbv": Pipeline(4, 2, "zbv"),
    "dualpipev": Pipeline(4, 2, "dualpipev"),
}
STEP = 0.005
"""Seconds of one of the three parts of one eighth of the model."""

TEXT = '''"""Chunks that sleep: {seconds} in each forward, as long for each of the two parts of the backward."""

import time

import torch
from torch import nn

from autopar.runtime.module import BlockModule, ParameterSpec
from autopar.runtime.pipeline.stage_modules import BoundaryTensor, ModelChunk
from autopar.runtime.pipeline.stage_modules import PipelineProgram as Base


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Work(BlockModule):
    specs = (ParameterSpec("weight", (2, 2), "float32", {{}}),)

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return self.split_backward.linear(Sleep.apply(x, self.seconds), self.weight)

{chunks}

class Program(Base):
    mesh_axes = {{"pp": {ranks}}}
    input_placements = {{"x": {{"dp": "S(0)"}}}}
    input_shapes = {{"x": (None, 2)}}
    micro_batches = {many}
    chunks = ({names})
    boundaries = ({boundaries})
    schedule = {schedule}

    def micro_batch_size(self, x):
        return x.shape[0]
'''
CHUNK = """
class Chunk{number}(ModelChunk):
    batch_inputs = ({takes})

    def __init__(self, mesh):
        super().__init__(mesh)
        self.work = Work(mesh, "{number}")
        self.work.seconds = {seconds}

    def forward(self, x):
        return self.work(x){loss}

"""


def text(pipeline: Pipeline, seconds: Sequence[float]) -> str:
    count = len(seconds)
    chunks = [
        CHUNK.format(number=n, takes='"x",' if n == 0 else "", seconds=each, loss=".sum()" if n == count - 1 else "")
        for n, each in enumerate(seconds)
    ]
    schedule = with_communication(schedule_of(pipeline, MANY))
    return TEXT.format(
        seconds=seconds,
        chunks="".join(chunks),
        ranks=pipeline.stages,
        many=MANY,
        names=", ".join(f"Chunk{n}" for n in range(count)),
        boundaries='(BoundaryTensor("x", lambda B: (B, 2), "float32"),), ' * (count - 1),
        schedule=tuple(" ".join(map(str, line)) for line in schedule.ranks),
    )


def run_asleep(texts: list[tuple[str, list[float]]]) -> list[float]:
    """On a rank: the shorter of two steps of each program."""
    import torch.distributed as dist

    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    out = []
    for text, seconds in texts:
        made: Any = load_program(text).Program
        program = made(MeshHandle(made.mesh_axes))
        state = {f"{number}.weight": torch.eye(2) for number in range(len(seconds))}
        parallel = Parallel(program, state)
        for chunk in program.own_chunks:  # what computes the weight's gradient, accumulates it
            chunk.work.weight.register_post_accumulate_grad_hook(lambda _, s=chunk.work.seconds: time.sleep(s))
        spent = []
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            parallel(x=torch.ones(MANY, 2))
            spent.append(time.perf_counter() - began)
        out.append(min(spent))
    return out


def halves(eighths: Sequence[float], pipeline: Pipeline) -> list[float]:
    """What each chunk sleeps."""
    if pipeline.virtual == 2:
        return list(eighths)
    return [a + b for a, b in zip(eighths[::2], eighths[1::2], strict=True)]


@pytest.mark.parametrize(
    "shape",
    [pytest.param((1, 1, 1, 1, 1, 1, 1, 1), marks=pytest.mark.slow), (1, 1, 1, 1, 1, 1, 1, 3)],
    ids=["even", "heavy-head"],
)
def test_schedules_rank_alike(shape: tuple[int, ...], ranks: RankPool) -> None:
    texts, simulated = [], []
    for pipeline in SCHEDULES.values():
        seconds = halves([STEP * each for each in shape], pipeline)
        texts.append((text(pipeline, seconds), seconds))
        clock = ScheduleClock.of(schedule_of(pipeline, MANY))
        parts = [ChunkSeconds(each, 2 * each, input_backward=each, weight_backward=each) for each in seconds]
        simulated.append(max(rank.end_seconds for rank in clock.run(parts)))
    best = [float("inf")] * len(texts)
    for _ in range(3):  # the least of several: other processes only make it longer
        found = ranks.run(run_asleep, texts, world=4)
        best = [min(before, max(each)) for before, each in zip(best, zip(*found, strict=True), strict=True)]
        wrong = misfits(dict(zip(SCHEDULES, zip(simulated, best, strict=True), strict=True)))
        if not wrong:
            break
    assert not wrong, wrong


def misfits(table: dict[str, tuple[float, float]]) -> list[str]:
    """Pairs of schedules in another order than the clock has them, and schedules that take much more than it says, or less."""
    out = []
    for (name, (planned, there)), (other, (its, theirs)) in combinations(table.items(), 2):
        if abs(planned - its) > 0.12 * min(planned, its) and (planned < its) != (there < theirs):
            out.append(f"{name} {planned:.3f} s, took {there:.3f}; {other} {its:.3f} s, took {theirs:.3f}")
    return out + [
        f"{name} {planned:.3f} s, took {there:.3f}"
        for name, (planned, there) in table.items()
        if not 0.99 * planned <= there < 1.4 * planned
    ]
