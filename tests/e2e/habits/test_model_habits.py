"""Habits around several models in one process, and a model as a function (docs/habits.md), on real ranks."""

from __future__ import annotations

import gc
import io
import os
import pickle
import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers
from support.harness.habits import parallel_of, refusal, test_habit, test_habit_under_other_plans  # noqa: F401
from support.models.habit_model import WIDTH, batch, net
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor


class Left(NamedTuple):
    """What this process holds. Tensors without data are not counted, of which each `torch.export` leaves two."""

    sharded: int
    tensors: int
    groups: int
    threads: int
    descriptors: int


def left() -> Left:
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and not isinstance(each, FakeTensor)]
    return Left(
        sum(isinstance(each, DTensor) for each in tensors),
        len(tensors),
        len(dist.distributed_c10d._world.pg_map),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def grown(before: Left, now: Left) -> bool:
    return any(a < b for a, b in zip(before, now, strict=True))


def train_and_forget(path: str) -> None:
    parallel = parallel_of(net(), path)
    optimizer = torch.optim.AdamW(parallel.parameters())
    for seed in range(2):
        optimizer.zero_grad()
        parallel(**batch(seed)).backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        parallel.eval()(**batch(5))
    dist.barrier()


def one_model_after_another(plan: str) -> None:
    """Five models leave what one does."""
    train_and_forget(plan)
    first = left()
    for _ in range(4):
        train_and_forget(plan)
    until = time.monotonic() + 10
    while grown(first, last := left()) and time.monotonic() < until:  # threads end soon after, those of the first model too
        time.sleep(0.2)
    assert not grown(first, last), (first, last)


def three_models(plan: str) -> None:
    """A frozen teacher, two students that train by turns; then one of them alone."""

    def run(teacher: nn.Module, *students: Any) -> list[float]:
        optimizers, losses = [torch.optim.SGD(each.parameters(), lr=0.1) for each in students], []
        for seed in range(3):
            with torch.no_grad():
                target = teacher(**batch(seed))
            found = [student(**batch(seed)) for student in students]
            for optimizer, student, loss in zip(optimizers, students, found, strict=True):
                optimizer.zero_grad()
                (loss - 0.1 * target).backward()
                torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
                optimizer.step()
            losses += [target.item(), *(each.item() for each in found)]
        del students, found, student, optimizers[1:]
        return losses

    mine, theirs = [parallel_of(net(), plan) for _ in range(3)], [net() for _ in range(3)]
    assert not (wrong := different_numbers("loss", run(*mine), run(*theirs), 1e-9)), wrong
    del mine[1:]
    gc.collect()
    assert not (wrong := different_numbers("loss", run(mine[0], mine[0]), run(theirs[0], theirs[0]), 1e-9)), wrong


def pickle_the_model(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    assert "a part of the parallel model cannot be pickled" in refusal(lambda: pickle.dumps(parallel.layers[0]))
    return refusal(lambda: torch.save(parallel, io.BytesIO()))


def call_a_part(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(parallel.layers[0].dropout(x), x)  # of a part without tensors
    return refusal(lambda: parallel.layers[0].up(x))


def functional_call(plan: str) -> str:
    """With the model's own tensors right."""
    parallel, reference = parallel_of(net(), plan), net()
    own = dict(parallel.named_parameters())
    found = torch.func.functional_call(parallel, own, (), batch())
    torch.testing.assert_close(found.detach(), reference(**batch()).detach(), rtol=1e-9, atol=1e-9)
    others = {name: parameter * 0.5 for name, parameter in own.items()}
    said = refusal(lambda: torch.func.functional_call(parallel, others, (), batch()))
    torch.testing.assert_close(parallel(**batch()).detach(), found.detach())
    return said
