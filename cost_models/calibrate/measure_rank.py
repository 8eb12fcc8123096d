"""A rank of a calibration. Imports torch: it runs in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_models.calibrate.measure import Effort, available_cores, machine_memory_bytes
from autopar.cost_models.calibrate.measure_collectives import collective_calls, narrower_groups
from autopar.cost_models.calibrate.measure_operations import operation_calls

_LEAST = 1e-7
BETWEEN_CALLS = 8
LEAST_ROUNDS = 3
"""Rounds of each task while there is time: buffers that are as large as none before get new pages once. Its budget is divided
into so many, where one call with the computation before it does not take more."""


@dataclass(slots=True)
class TimedCall:
    """An operation or collective to time: name, FLOPs or bytes, the call, how many calls make a slice, in how many rounds, and
    the seconds of each round, by the wall clock and its own (see `RankBenchmark.slice`). `between`: what a rank computes before
    each call, timed by itself too, whose seconds do not count; what the call then waits, for ranks that still compute on the same
    cores, does."""

    name: str
    work: float
    call: Callable[[], object]
    calls: int = 1
    rounds: int = 1
    between: TimedCall | None = None
    width: int = 0
    clock: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return what is merged over ranks: seconds without those of `between`, which are the same in all rounds and so better
        known than those of one round."""
        base_clock, base_own = (median(self.between.clock), median(self.between.own)) if self.between else (0.0, 0.0)
        own = [max(_LEAST, each - base_own) for each in self.own]
        clock = [max(used, each - base_clock) for used, each in zip(own, self.clock, strict=True)]
        return {"name": self.name, "work": self.work, "width": self.width, "clock": clock, "own": own}


@dataclass(frozen=True, slots=True)
class RankBenchmark:
    """The device and effort of one rank. If ranks share the cores evenly, `share` is wall-clock seconds per processor second of a
    rank, and `alone` per processor second of its main thread alone. `began`: when the whole measurement did (`time.time`)."""

    device: torch.device
    effort: Effort
    share: float
    alone: float
    say: Callable[[str], object]
    began: float = 0.0

    def _limit_seconds(self, share: tuple[float, float]) -> float:
        """Return the limit of a part, as all ranks have it: what is left of the whole where that has a limit."""
        seconds, whole = self.effort.limit_seconds, self.effort.total_seconds
        if whole:
            left = self.began + whole - time.time()
            seconds = min(seconds, max(0.0, left) * (share[1] - share[0]) / (1 - share[0]))
        shared = torch.tensor([seconds], device=self.device)
        dist.all_reduce(shared, op=dist.ReduceOp.MIN)
        return float(shared.item())

    def _on_gpu(self, task: TimedCall) -> float:
        """Return the seconds of all calls on the GPU's own clock, between two events of its stream."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        first.record()
        for _ in range(task.calls):
            task.call()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def slice(self, task: TimedCall) -> tuple[float, float]:
        """Return (clock, own) seconds of one call of `task.calls`, with what is computed before it: own is processor time times
        its share, of all threads or of the main one, whichever is longer; on a GPU both are the GPU's."""
        dist.barrier()
        if self.device.type == "cuda":
            passed = self._on_gpu(task) / task.calls
            return passed, passed
        before = (task.between.call,) if task.between else ()
        return self._timed((*before, task.call), task.calls)

    def _timed(self, functions: Sequence[Callable[[], object]], times: int) -> tuple[float, float]:
        """Return (clock, own) seconds of one call of all functions."""
        clock, processor, thread = time.perf_counter(), time.process_time(), time.thread_time()
        for _ in range(times):
            for function in functions:
                function()
        passed = time.perf_counter() - clock
        own = max((time.process_time() - processor) * self.share, (time.thread_time() - thread) * self.alone)
        return passed / times, own / times

    def between(self) -> TimedCall | None:
        """Return a matrix product to be computed before each collective, where ranks share cores: as in a step, some of them
        still compute when the first ones wait, and messages wait for a core. Measured on 4 ranks of 2 cores, an all-reduce of 512
        KiB took 11 ms after products of 6 ms, and 5 ms without; what is functional and of 4 MB 11 ms after 10 ms of products, 13
        to 19 after 40 ms, and 9 without: so much as in a step between two collectives."""
        if self.device.type != "cpu" or self.alone <= 1:
            return None
        a, b = torch.randn(512, 768), torch.randn(768, 768)
        return TimedCall("between", 0.0, partial(torch.mm, a, b, out=torch.empty(512, 768)), calls=BETWEEN_CALLS)

    def rounds(self, what: str, tasks: list[TimedCall], share: tuple[float, float]) -> float:
        """Time each task in as many rounds as its share of the time allows, the first of which is what `_plan` looks at; return
        how long all took. `share` is where this begins and ends in the whole measurement."""
        start = time.perf_counter()
        limit = self._limit_seconds(share)
        most = limit if self.effort.total_seconds else 2 * limit
        befores = list({id(task.between): task.between for task in tasks if task.between}.values())
        for before in befores:
            self._time(before)
        for task in tasks:
            self._plan(task, limit / len(tasks))
        rounds = max(task.rounds for task in tasks)
        for done in range(1, rounds + 1):
            late = torch.tensor([float(time.perf_counter() - start > most)], device=self.device)
            dist.all_reduce(late, op=dist.ReduceOp.MAX)
            if late.item() and (done > 1 or self.effort.total_seconds):  # what was planned by is better than waiting
                break
            if done == 1:
                _forget_single_calls(tasks)
            so_far = share[0] + (share[1] - share[0]) * (done - 1) / rounds
            self.say(f"{so_far:.3f} {what}: {len(tasks)} kinds, round {done} of {rounds}")
            for before in befores:
                self._time(before)
            for task in tasks:
                if len(task.clock) < task.rounds:
                    self._time(task)
        passed = time.perf_counter() - start
        self.say(f"{share[1]:.3f} {what}: took {passed:.1f} s")
        return passed

    def _time(self, task: TimedCall) -> None:
        clock, own = self.slice(task)
        task.clock.append(clock)
        task.own.append(own)

    def _plan(self, task: TimedCall, budget_seconds: float) -> None:
        """Plan calls that fill a slice, fewer where ranks compute between them for longer than the budget, and as many rounds as
        the budget allows; agreed on by all ranks. The first call (which may set things up) does not count."""
        task.call()
        start = time.perf_counter()
        self._time(task)
        seen = torch.tensor([task.to_dict()["clock"][0], time.perf_counter() - start], device=self.device)
        dist.all_reduce(seen)
        seconds, whole = (float(each) / dist.get_world_size() for each in seen)
        calls = self.effort.slice_seconds / seconds
        if task.between is not None:
            calls = min(calls, budget_seconds / (LEAST_ROUNDS * whole))
        task.calls = max(1, min(1000, int(calls)))
        task.rounds = max(LEAST_ROUNDS, min(self.effort.rounds, int(budget_seconds / (task.calls * whole))))


def _forget_single_calls(tasks: Sequence[TimedCall]) -> None:
    """Forget the single call by which a slice was planned."""
    for task in tasks:
        if task.calls > 1:
            task.clock.clear()
            task.own.clear()


def fork_ranks(job: str) -> None:
    """Fork the ranks of a measurement, and end with the first that fails. One process imports torch for all of them: on two cores
    the imports of four would take longer than everything that is measured."""
    size, folder = int(json.loads(job)["size"]), Path(json.loads(job)["folder"])
    ranks = {_fork(rank, job, folder): rank for rank in range(size)}
    while ranks:
        ended, status = os.wait()
        rank = ranks.pop(ended)
        if status:
            (folder / f"{rank}.failed").touch()
            for other in ranks:  # they would wait for it
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def _fork(rank: int, job: str, folder: Path) -> int:
    """Fork, and return the process number of the rank; in the rank itself, never."""
    if child := os.fork():
        return child
    status = 1
    try:
        os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
        measure_as_rank(rank, job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:  # not sys.exit: a thread of gloo that lets go of its last tensors while the interpreter ends aborts now and then
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def measure_as_rank(rank: int, job: str) -> None:
    """Measure as one of the ranks, and write ``folder/rank.json``. Progress goes to stdout."""
    data = json.loads(job)
    size, folder, began = int(data.pop("size")), Path(data.pop("folder")), float(data.pop("began"))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    threads = max(1, available_cores() // size)
    torch.set_num_threads(threads)
    if cuda:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=240)
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("nccl" if cuda else "gloo", init_method=where, rank=rank, world_size=size, timeout=limit)
    say: Callable[[str], object] = partial(print, flush=True) if rank == 0 else lambda line: None
    try:
        timings = _measure(
            RankBenchmark(
                device, Effort(**data), max(1 / threads, size / available_cores()), max(1.0, size / available_cores()), say, began
            ),
            size,
        )
        dist.barrier()
    finally:
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(timings))


def _measure(bench: RankBenchmark, size: int) -> dict[str, Any]:
    operations = [TimedCall(*each) for each in operation_calls(bench.device, bench.effort.thorough)]
    parts = [("operations", bench.rounds("operations", operations, (0.0, 0.5 if size > 1 else 1.0)))]
    sent: list[TimedCall] = []
    if size > 1:
        between = bench.between()
        sent = [TimedCall(*each, between=between) for each in collective_calls(bench.device, size, bench.effort.thorough)]
        for width, group in narrower_groups(size) if bench.effort.thorough else ():
            calls = collective_calls(bench.device, width, True, group)
            sent += [TimedCall(*each, between=between, width=width) for each in calls]
        parts.append(("collectives", bench.rounds("collectives", sent, (0.5, 1.0))))
    plain = [[task.to_dict() for task in tasks] for tasks in (operations, sent)]
    return {"facts": device_facts(bench.device, size), "operations": plain[0], "collectives": plain[1], "parts": parts}


def vector_bits() -> int:
    """Return the bits of the registers that torch's kernels use on this CPU."""
    return {"AVX512": 512, "AVX2": 256, "SVE256": 256}.get(torch.backends.cpu.get_cpu_capability(), 128)


def device_facts(device: torch.device, size: int) -> dict[str, Any]:
    """Return name, memory and the driver's properties of the device, of `size` on this machine.

    `base_bytes`: used besides tensors, by context and communicators.
    """
    if device.type == "cpu":
        name = platform.processor() or platform.machine() or "CPU"
        shared = max(1.0, size / available_cores())
        facts = {"kind": "cpu", "name": f"{name} process", "memory_bytes": machine_memory_bytes() // size, "base_bytes": 2**29}
        return {**facts, "ranks_per_core": shared, "vector_bits": vector_bits()}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    major = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell"}.get(properties.major, "")
    return {
        "kind": "cuda",
        "name": properties.name,
        "memory_bytes": total,
        "base_bytes": max(0, total - free - torch.cuda.memory_reserved(device)),
        "generation": major,
        "multiprocessors": properties.multi_processor_count,
        "host_bytes": machine_memory_bytes() // size,
    }
