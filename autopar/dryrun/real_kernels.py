"""The run of one rank of a plan on the device at hand: real kernels on real tensors, while collectives move nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.dryrun.compat import fake_group
from autopar.dryrun.run import check_rank, make_optimizer
from autopar.ir.plan_file.plan_file import Plan
from autopar.passes.lower import lower
from autopar.program.build import build_program
from autopar.program.export import random_batch
from autopar.report.predicted_step import predicted_step
from autopar.runtime.comm.p2p import PendingReceive, PointToPoint
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.module import ParameterSpec
from autopar.runtime.parallel import Parallel
from autopar.runtime.quantities import seconds_words
from autopar.runtime.report.compare import ratio_words, tables
from autopar.runtime.state.parameter_table import parameter_index
from autopar.runtime.step.inputs import NamedBatch

_SCALE = 0.02
"""Standard deviation of the weights, and of what other stages would send."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """The measurement of one rank. `measured`: as `runtime.report` combines it, of this rank alone; its waits are of collectives
    that moved nothing. `peak_bytes`: of its tensors, as the allocator counted them."""

    rank: int
    stage: int
    device: str
    measured: dict[str, Any]
    peak_bytes: int


def measure_rank(plan: Plan, rank: int = 0, steps: int = 5, threads: int = 1, compiler: str = "") -> RealRun:
    """Train `steps` steps with random weights and a random batch, and one more for its memory. AutoparError where the plan has no
    such rank. On a CPU it computes with so many `threads` (torchrun gives each rank one). `compiler`: of torch.compile, for
    blocks; none: they run as they are."""
    candidate = plan.candidate
    check_rank(plan, rank)
    module = build_program(plan.graph, candidate)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with fake_group(rank, candidate.devices):
            parallel = _parallel(module.Program, compiler)
            device = parallel.program.mesh.device
            batch = {name: tensor.to(device) for name, tensor in random_batch(lower(plan.graph, candidate)).items()}
            optimizer = make_optimizer(plan.document.optimizer, parallel, device.type != "cpu")
            measured = _measure(parallel, batch, optimizer, steps)
            peak = measured["memory"][0]["peak_bytes"] if measured["memory"] else 0
            return RealRun(rank, parallel.program.mesh.pp.coordinate, str(device), measured, peak)
    finally:
        torch.set_num_threads(before)


def _parallel(program_class: Any, compiler: str) -> Parallel:
    """Build the program of this rank with random weights, each made when it is asked for, and on the device: the host would take
    minutes for those of a large model."""
    program = program_class(MeshHandle(program_class.mesh_axes))
    specs = parameter_index(program.roots()).specs
    generator = torch.Generator(program.mesh.device).manual_seed(0)
    parallel = Parallel(program, lambda name: _random(specs[name], generator), check_batch_every=0, compile=compiler)
    if parallel.pipeline_step is not None:
        executor = parallel.pipeline_step.executor
        executor.p2p = _OtherStages(program.mesh, executor.p2p.groups)
    return parallel


def _random(spec: ParameterSpec, generator: torch.Generator) -> torch.Tensor:
    """Draw a parameter: ones for what may be a scale, normal numbers for the rest."""
    dtype, device = getattr(torch, spec.dtype), generator.device
    if not dtype.is_floating_point:
        return torch.zeros(spec.shape, dtype=dtype, device=device)
    if spec.buffer or (len(spec.shape) < 2 and spec.path.endswith("weight")):
        return torch.ones(spec.shape, dtype=dtype, device=device)
    return torch.randn(spec.shape, generator=generator, device=device).mul_(_SCALE).to(dtype)


class _OtherStages(PointToPoint):
    """A transport that receives normal numbers (integers: zeros) instead of what lies in new memory, which may be no numbers."""

    def receive(self, tensors: list[torch.Tensor], stage: int, tag: int) -> PendingReceive:
        for each in tensors:
            if each.dtype.is_floating_point:
                each.copy_(self._numbers(each))
            else:
                each.zero_()
        return super().receive(tensors, stage, tag)

    def _numbers(self, like: torch.Tensor) -> torch.Tensor:
        """Return four thousand numbers, repeated: a copy of as many bytes as a message."""
        few = torch.linspace(-3 * _SCALE, 3 * _SCALE, 4096, dtype=like.dtype, device=like.device)
        times = -(-like.numel() // few.numel())
        return few.expand(times, -1).reshape(-1)[: like.numel()].view(like.shape)


def _measure(parallel: Parallel, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Any]:
    """Measure steps after one that is not counted, which makes the optimizer's state."""

    def train(count: int) -> None:
        for _ in range(count):
            result = parallel(NamedBatch(batch))
            (result if isinstance(result, torch.Tensor) else result.loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    def measured(count: int) -> dict[str, Any]:
        measurement = parallel.measure(count)
        train(count + 1)
        found = measurement.report().measured
        measurement.stop()
        return found

    train(1)
    if parallel.compiler:
        measured(1)  # blocks that are observed are compiled anew
    return measured(steps)


def compare_with_plan(plan: Plan, run: RealRun) -> dict[str, Any]:
    """Return `tables` of text and `compute` (seconds): computing time and memory beside the plan's prediction, if any."""
    predicted = predicted_step(plan) if plan.document.cluster.description else None
    predicted_tables = {name: [r for r in predicted[name] if r["stage"] == run.stage] for name in _TOLD} if predicted else {}
    (row,) = run.measured["stages"]
    (other,) = predicted_tables.get("stages") or [{}]
    parts = (("compute", "compute_seconds"), ("optimizer", "optimizer_seconds"))
    rows = [[name, row[key], other.get(key)] for name, key in parts]
    rows.append(["both", rows[0][1] + rows[1][1], rows[0][2] + rows[1][2] if other else None])
    rows.append(["of it outside of blocks (the host's own work)", row["compute_seconds"] - row["blocks_seconds"], None])
    rows.append(["processor time of both, the least of the steps", row["least_processor_seconds"], None])
    if not row["least_processor_seconds"]:
        rows.pop()
    lines = [[name, seconds_words(m), seconds_words(p), ratio_words(m, p)] for name, m, p in rows]
    measured = run.measured | {"collectives": [], "stages": []}
    rest = tables(measured, predicted_tables | {"stages": [], "collectives": []})
    return {
        "compute": {name: {"measured": m, "predicted": p} for name, m, p in rows},
        "tables": [("Computing time of a step", ("part", "measured", "predicted", "ratio"), lines), *rest],
    }


_TOLD = ("stages", "blocks", "memory")
