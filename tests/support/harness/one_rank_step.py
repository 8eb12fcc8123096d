"""A script: takes real steps of one rank of a plan on this machine's first GPU (else its CPU), with collectives that send
nothing, and prints what they took as JSON. ``python one_rank.py plan.json [steps]``."""

from __future__ import annotations

import json
import sys
from statistics import median
from time import perf_counter

import torch

from autopar.dryrun.compat import fake_group
from autopar.dryrun.run import make_optimizer
from autopar.ir import dims
from autopar.ir.plan_file.plan_file import Plan, load_plan
from autopar.program.build import build_program
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.parallel import Parallel

WARM_UP = 3
"""Steps before the measured ones: kernels are chosen, the optimizer's state and the allocator's blocks are made."""

_WORDS = 100


def measure(plan: Plan, steps: int) -> dict[str, float | str]:
    """Median seconds of a step, its part in the optimizer, and the most bytes that were allocated (0 on a CPU)."""
    with fake_group(0, plan.candidate.devices):
        mesh = MeshHandle({axis.name: axis.size for axis in plan.candidate.mesh.axes})
        program = build_program(plan.graph, plan.candidate).Program(mesh)
        specs = {block.original_names[spec.path]: spec for block in program.blocks() for spec in block.specs}
        parallel = Parallel(program, lambda name: _drawn(specs[name].shape, specs[name].dtype, mesh.device))
        optimizer = make_optimizer(plan.document.optimizer, parallel, foreach=mesh.device.type == "cuda")
        batch = {
            value.name: _drawn(dims.shape_at(value.shape, plan.candidate.batch), value.dtype, mesh.device)
            for value in plan.graph.inputs
        }
        laps = []
        for step in range(WARM_UP + steps):
            if step == WARM_UP and mesh.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            laps.append(_lap(parallel, optimizer, batch, mesh.device))
        peak = torch.cuda.max_memory_allocated() if mesh.device.type == "cuda" else 0
    name = torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu"
    return {
        "device": name,
        "seconds": median(sum(lap) for lap in laps[WARM_UP:]),
        "optimizer_seconds": median(lap[1] for lap in laps[WARM_UP:]),
        "peak_bytes": peak,
    }


def _lap(
    parallel: Parallel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], device: torch.device
) -> tuple[float, float]:
    """Seconds of forward and backward, and of the optimizer."""
    clock = _Clock(device)
    clock.mark()
    parallel(**batch).backward()
    clock.mark()
    optimizer.step()
    clock.mark()
    optimizer.zero_grad()
    first, second = clock.laps()
    return first, second


class _Clock:
    """Marks on the device's own stream, so that the host's time does not count where it runs ahead."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(perf_counter())

    def laps(self) -> list[float]:
        if self.cuda:
            torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [_between(before, after) for before, after in pairs]


def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)
        return after - before
    return before.elapsed_time(after) / 1e3


def _drawn(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """Small words, or small numbers as a fresh model has them; made on the device, since a host copy would be slow."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.randn(shape, device=device).mul_(0.02).to(kind)
    if kind is torch.bool:
        return torch.ones(shape, dtype=kind, device=device)
    return torch.randint(0, _WORDS, shape, device=device).to(kind)


if __name__ == "__main__":
    print(json.dumps(measure(load_plan(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)))
