"""A rank of a calibration across nodes: torchrun has started it, the ranks meet over the network that training will use, and
every level of links is timed by groups of its own, all of them at once, as in training. Imports torch."""

from __future__ import annotations

import os
import platform
import time
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_models.calibrate.measure import WIRE_BYTES, CalibrationRun, Effort, LevelRuns, Progress, merge_ranks
from autopar.cost_models.calibrate.measure_collectives import SIZES, calls_of_size, state_calls_of_size
from autopar.cost_models.calibrate.measure_operations import operation_calls
from autopar.cost_models.calibrate.measure_rank import RankBenchmark, TimedCall, device_facts
from autopar.errors import ClusterError

SLOW_SECONDS = 0.5
"""Seconds of one call of each kind over links between machines from which on larger messages are not timed."""

WIRE_SLICE_SECONDS = 0.25
"""The slice of large messages over links between machines. Such a link may carry the first bytes after a rest (a token bucket's
burst) at a higher rate: messages follow one another without rests, for so long that the burst is a small part."""

MEETING_SECONDS = 240


@dataclass(frozen=True, slots=True)
class JoinedRank:
    """A process as its launcher describes it: its rank among `size`, and on its node among `local_size`."""

    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True, slots=True)
class _LevelGroup:
    """This rank's group on a level, of `width` ranks; over a `wire` between machines, or inside of one."""

    devices: int
    width: int
    group: dist.ProcessGroup | None
    wire: bool


def check_levels(levels: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the levels that join more than one device of the next inner one. ClusterError where one does not divide the next."""
    sizes = (*(each for each in levels if each < size), size)
    inside = 1
    for each in sizes:
        if each % inside or each < inside:
            raise ClusterError(f"levels {','.join(map(str, sizes))}: each must be a multiple of the one before it")
        inside = each
    return tuple(after for before, after in pairwise((1, *sizes)) if after > before)


def measure_joined(here: JoinedRank, levels: tuple[int, ...], effort: Effort, progress: Progress) -> LevelRuns | None:
    """Measure as one of the ranks; the result on rank 0, None on the others. ClusterError where the ranks do not meet, or a node
    has more ranks than another."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= here.local_size
    device = torch.device("cuda", here.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=MEETING_SECONDS))
    except (RuntimeError, ValueError) as error:
        line = str(error).splitlines()[0]
        raise ClusterError(
            f"the {here.size} ranks did not meet ({line}): start torchrun on every node, with one address"
        ) from None
    try:
        each: list[Any] = [None] * here.size
        dist.all_gather_object(each, (here.local_size, _machine(), sorted(_cores())))
        if len({local for local, _, _ in each}) > 1:
            raise ClusterError("nodes have different numbers of ranks: give torchrun the same --nproc-per-node on all")
        same = [cores for _, machine, cores in each if machine == _machine()]
        warnings.simplefilter("ignore", FutureWarning)  # newer names of collectives, which older releases lack
        run = _measure(device, len(same), len(set().union(*same)), _groups(levels, here), effort, progress)
        gathered: list[Any] = [None] * here.size
        dist.all_gather_object(gathered, run)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if here.rank:
        return None
    return _merged(gathered, levels, here)


def _merged(gathered: list[dict[str, Any]], levels: tuple[int, ...], here: JoinedRank) -> LevelRuns:
    def run(index: int, wire: bool) -> CalibrationRun:
        ranks = [{**rank, "facts": dict(rank["facts"]), "collectives": rank["levels"][index]} for rank in gathered]
        return merge_ranks(ranks, wire)

    runs = tuple((devices, run(index, devices > here.local_size)) for index, devices in enumerate(levels))
    return LevelRuns(runs, run(len(levels), here.size > here.local_size), here.size // here.local_size)


def _groups(levels: tuple[int, ...], here: JoinedRank) -> list[_LevelGroup]:
    """Return of each level this rank's neighbours on it: of equal place in each of the next inner level's parts; and at last all
    ranks. All ranks must call."""
    out = []
    for inside, devices in pairwise((1, *levels)):
        for first in (start + place for start in range(0, here.size, devices) for place in range(inside)):
            ranks = [first + step * inside for step in range(devices // inside)]
            group = dist.new_group(ranks)
            if here.rank in ranks:
                out.append(_LevelGroup(devices, devices // inside, group, devices > here.local_size))
    return [*out, _LevelGroup(here.size, here.size, None, here.size > here.local_size)]


def _measure(
    device: torch.device, ranks: int, cores: int, groups: list[_LevelGroup], effort: Effort, progress: Progress
) -> dict[str, Any]:
    """Time operations, then each level. `ranks` share the `cores` of this machine (also where they are several nodes)."""
    say = partial(_say, progress) if dist.get_rank() == 0 else _silent
    share, alone = max(1 / torch.get_num_threads(), ranks / cores), max(1.0, ranks / cores)
    bench = RankBenchmark(device, effort, share, alone, say)
    operations = [TimedCall(*each) for each in operation_calls(device, effort.thorough)]
    parts = [("operations", bench.rounds("operations", operations, (0.0, 0.4)))]
    timings = []
    for index, level in enumerate(groups):
        begin, end = (0.4 + 0.6 * part / len(groups) for part in (index, index + 1))
        what = f"links that join {level.devices}" if index < len(groups) - 1 else "all ranks together"
        started = time.perf_counter()
        timings.append(_level_timings(bench, level, what, (begin, end)))
        parts.append((what, time.perf_counter() - started))
    return {
        "facts": device_facts(device, ranks),
        "operations": [task.to_dict() for task in operations],
        "levels": [[task.to_dict() for task in tasks] for tasks in timings],
        "parts": parts,
    }


def _level_timings(bench: RankBenchmark, level: _LevelGroup, what: str, share: tuple[float, float]) -> list[TimedCall]:
    """Time each kind in sizes that grow, between machines until they take long. The sizes divide the level's time evenly."""
    effort = replace(bench.effort, limit_seconds=bench.effort.limit_seconds / len(SIZES))
    out: list[TimedCall] = []
    (begin, end), products = share, bench.between()
    for index, full in enumerate(SIZES):
        if level.wire and index and full // level.width < WIRE_BYTES:
            continue  # a token bucket's burst would carry all of it, which says nothing of the bandwidth
        calls = [*calls_of_size(bench.device, level.width, full, level.group)]
        if not level.wire:  # beside a network copies are small
            calls += state_calls_of_size(bench.device, level.width, full, level.group)
        bound = level.wire and full // level.width >= WIRE_BYTES
        between = None if bound else products
        tasks = [TimedCall(*each, between=between) for each in calls]
        least = max(effort.slice_seconds, WIRE_SLICE_SECONDS) if bound else effort.slice_seconds
        timing = replace(bench, effort=replace(effort, slice_seconds=least))
        part = begin + (end - begin) * index / len(SIZES), begin + (end - begin) * (index + 1) / len(SIZES)
        timing.rounds(f"{what}, {full // 1024} KiB", tasks, part)
        out += tasks
        if not level.wire:
            continue
        longest = torch.tensor([sum(min(task.clock) for task in tasks)], device=bench.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        if longest.item() > SLOW_SECONDS:
            break
    return out


def _say(progress: Progress, line: str) -> None:
    share, _, what = line.partition(" ")
    progress(what, float(share))


def _silent(line: str) -> None:
    """Say nothing, on all ranks but the first."""


def _machine() -> str:
    """Return one text per running kernel: containers and network namespaces of one machine share its cores."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _cores() -> set[int]:
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
