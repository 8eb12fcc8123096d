"""An allocation that fails ends in one line: what was asked for, what is in use, what was predicted, and what would fit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.failing_run import Fault, failing_runs
from support.harness.rank_pool import RankPool
from support.models.handwritten_program import Model, V, make

from autopar.errors import AutoparError

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "3221225472 bytes."
)
CUDA = "CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is free."


def failing(moment: str, on_device: bool) -> str:
    """On a rank: what its second step says in which an allocation fails, on all ranks alike."""
    from autopar.runtime.errors import MemoryProblem
    from autopar.runtime.parallel import Parallel

    parallel = Parallel(make({"dp": 2, "tp": 2}, 0), Model().double().state_dict())
    optimizer = torch.optim.AdamW(parallel.parameters())
    data = {name: torch.randint(1, V, (16, 6), generator=torch.Generator().manual_seed(0)) for name in ("ids", "labels")}

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError(CUDA) if on_device else RuntimeError(CPU)

    block = next(block for block in reversed(list(parallel.program.blocks())) if block.prefix.startswith("layers."))
    said: list[str] = []
    for number in (1, 2, 3):
        if number == 2 and moment == "forward":
            handle = block.register_forward_pre_hook(fail)
        if number == 2 and moment == "backward":
            handle = block.register_forward_hook(lambda _, __, result: result.register_hook(fail) and None)
        try:
            parallel(**data).backward()
            if number == 2 and moment == "optimizer.step":
                handle = optimizer.register_step_pre_hook(fail)
            optimizer.step()
        except MemoryProblem as problem:
            said.append(str(problem))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            said.append(str(parallel.memory.answer(error)))
        if number == 2:
            handle.remove()
        optimizer.zero_grad()
    assert len(said) == 1, said
    return said[0]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer.step"])
def test_a_failed_allocation_is_answered(moment: str, on_device: bool, ranks: RankPool) -> None:
    for text in ranks.run(failing, moment, on_device):
        assert (
            text.startswith(f"out of memory in step 2, {moment}: ") and "3.0 GiB more were asked for" in text and "\n" not in text
        ), text
        for kind in ("parameters", "optimizer", "activations and the rest"):
            assert f"{kind} " in text.partition(" in use (")[2], text


def uncaught() -> list[str]:
    """On a fresh rank, whose hook no other test has changed: what is written of a failed allocation, and of another error."""
    import contextlib
    import io

    from autopar.runtime.patches import apply_patches
    from autopar.runtime.step import out_of_memory

    apply_patches()
    guard = out_of_memory.MemoryGuard(torch.device("cpu"))
    with guard.catching("forward"):
        pass
    guard.step, guard.doing = 5, "optimizer.step"
    said = []
    for error in (torch.OutOfMemoryError(CUDA), ValueError("something else")):
        with contextlib.redirect_stderr(io.StringIO()) as written:
            sys.excepthook(type(error), error, None)
        said.append(written.getvalue())
    return said


def test_an_uncaught_one_is_answered_too(ranks: RankPool) -> None:
    """The optimizer's step is not autopar's code: its error is torch's own, and the answer follows it."""
    failed, other = ranks.run_alone(uncaught)
    last = failed.splitlines()[-1]
    assert "autopar: out of memory in step 5, optimizer.step: 3.0 GiB more were asked for, " in last, last
    assert "something else" in other and "autopar" not in other


class Wide(torch.nn.Module):
    """Most of its memory is the state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device="meta") for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_the_answer_names_the_prediction_and_a_plan_that_fits() -> None:
    import autopar
    from autopar.explain.run_time import memory_answer
    from autopar.runtime.step.out_of_memory import Usage

    force = "tp=1,pp=1,zero=0,micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0"
    plan = autopar.plan(Wide(), "local:4", (torch.zeros(16, 4096),), force=force)
    peak = plan.document.predicted.peak_memory_bytes
    assert peak is not None
    text = memory_answer(plan, Usage({"parameters": 2**29}, peak, peak // 4))
    assert text.startswith("the plan predicted a peak of ") and "optimizer 1.0 GiB" in text
    assert 'plan with force="dp=4,zero=' in text and "\n" not in text
    suggested = text.partition('force="')[2].partition('"')[0]
    fitting = autopar.plan(Wide(), "local:4", (torch.zeros(16, 4096),), force=suggested).document.predicted.peak_memory_bytes
    assert fitting is not None and fitting <= peak * 0.8
    assert "no single change is predicted to take as little as" in memory_answer(plan, Usage({}, peak, 50 * peak))


def check_faults(ranks: RankPool, folder: Path, plans: Callable[[str], str], faults: list[Fault]) -> None:
    for fault, outcomes in failing_runs(ranks, folder, faults, plans, 6.0).items():
        where = "in step 2, " + ("forward" if "pp" in fault.plan and fault.moment == "backward" else fault.moment)
        for rank, outcome in outcomes.items():
            assert outcome.status == 1 and outcome.seconds < 7.5, f"{fault}: rank {rank}: {outcome}"
            if rank == fault.culprit:
                line = next(line for line in outcome.text.splitlines() if f"out of memory {where}" in line)
                assert "1.0 GiB more were asked for" in line and "the plan predicted a peak of 0.5 GiB (" in line, line
            else:
                told = "can't allocate memory" if fault.moment == "optimizer.step" else f"MemoryProblem: out of memory {where}"
                assert any("rank 2" in line and told in line for line in outcome.text.splitlines()), outcome.text


def test_a_rank_that_runs_out_of_memory_is_named(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    check_faults(ranks, tmp_path, plans, [Fault("dp=2,tp=2", "runs out of memory", "backward")])


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["forward", "backward", "optimizer.step"])
def test_every_rank_names_it_under_every_plan(moment: str, ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    every = ("dp=4", "dp=4,zero=3", "dp=2,tp=2", "pp=2,dp=2")
    check_faults(ranks, tmp_path, plans, [Fault(plan, "runs out of memory", moment) for plan in every])


def test_memory_problems_are_autopar_errors() -> None:
    from autopar.runtime.errors import MemoryProblem

    assert issubclass(MemoryProblem, AutoparError)
