"""Measures some training steps of a parallel model, and gathers what all ranks have measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves

from ..comm.agreement import gather
from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import RuntimeProblem
from ..step.inputs import LocalBatch
from .meter import Meter, StepTimes, block_class, clock_of
from .observe import PeakWatch
from .step_report import StepReport, combine

Predict = Callable[[], dict[str, Any]]
"""The prediction of the plan, as `step_report` reads it."""


class Measurement:
    """Measures the next `steps` training steps, and one more for its memory; then it takes its hooks out. As a context manager
    it ends with the context, or before. A step is from the forward to the end of the optimizer's step."""

    def __init__(self, parallel: Any, steps: int = 3) -> None:
        if steps < 1:
            raise RuntimeProblem(f"measure(steps={steps}): measure at least 1 step")
        self.parallel, self.wanted = parallel, steps
        self.steps: list[StepTimes] = []
        self.memory: dict[str, int] = {}
        self.examples = 0
        mesh: MeshHandle = parallel.program.mesh
        self.peak = PeakWatch(mesh.device)
        self.held: dict[str, int] | None = None
        self.meter = Meter(clock_of(mesh.device), _axes(mesh), self._owns, self._begun, self._ended)
        programs = [parallel.program] if parallel.variants is None else parallel.variants.different_programs()
        blocks = [block for program in programs for block in program.blocks()]
        self.meter.install(parallel, blocks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """End the measurement with the steps that are done."""
        self._finish()
        self.meter.remove()

    def _finish(self) -> None:
        self.meter.finish()
        if self.held is not None:
            self.peak.stop()
            self.held = None

    def report(self) -> StepReport:
        """Return the measurements of all ranks (all must call). RuntimeProblem where one has measured no step yet."""
        parallel, mesh = self.parallel, self.parallel.program.mesh
        own = self._of_this_rank()
        everywhere = gather(own)
        if any(not each["steps"] for each in everywhere):
            raise RuntimeProblem(
                "no step is measured yet: call parallel.measure(steps=3), train for four steps (forward, backward, "
                "optimizer.step()), and then parallel.report()"
            )
        if self.meter.finished:
            self.meter.remove()
        measured = combine(everywhere, mesh.pipeline_axes | mesh.launched_axes, str(mesh.device.type), bool(parallel.compiler))
        predicted = parallel.predicted_step() if parallel.predicted_step is not None else None
        spans = {rank: each["spans"] for rank, each in enumerate(everywhere) if each["spans"]}
        return StepReport(measured, predicted, dist.get_rank() if len(everywhere) > 1 else 0, spans)

    # -- called by the meter

    def _owns(self, optimizer: Optimizer) -> bool:
        own = {id(parameter) for parameter in self.parallel.state.parameters.values()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return any(id(parameter) in own for parameter in parameters) or all(not each.numel() for each in parameters)

    def _begun(self, arguments: Any) -> None:
        self.examples += _examples(arguments)
        if len(self.steps) == self.wanted and self.held is None:
            held = self._held(arguments)
            if self.peak.start():
                self.held = held

    def _ended(self, step: StepTimes) -> None:
        step.examples, self.examples = self.examples, 0
        if len(self.steps) < self.wanted:
            self.steps.append(step)
            return
        if self.held is not None:
            state = sum(self.held.values())
            gradients = self.parallel.memory.kinds().get("gradients", 0)
            most = state + self.peak.stop()
            self.memory = self.held | {"gradients": gradients, "peak": most}
            self.held = None
        self._finish()

    def _held(self, arguments: Any) -> dict[str, int]:
        """Bytes before the step, by kind. Gradients that are left from the step before are freed in it or written again."""
        kinds: dict[str, int] = dict(self.parallel.memory.kinds())
        state = self.parallel.state
        buckets = [bucket for each in (state.buckets, *state.chunk_buckets) for bucket in each.buckets]
        spare = [bucket.spare_flat for bucket in buckets if bucket.spare_flat is not None]
        return {
            "parameters": kinds.get("parameters", 0),
            "optimizer": kinds.get("optimizer", 0),
            "inputs": sum(each.nbytes for each in _tensors(arguments)),
            "left": max(kinds.get("gradients", 0), sum(each.nbytes for each in spare)),
        }

    # -- the result

    def _of_this_rank(self) -> dict[str, Any]:
        mesh: MeshHandle = self.parallel.program.mesh
        modules: dict[str, list[Any]] = {}
        for block in self.parallel.program.blocks():
            entry = modules.setdefault(block_class(block), [0, block.prefix])
            entry[0] += 1
        return {
            "stage": mesh.pp.coordinate,
            "blocks": modules,
            "memory": self.memory,
            "micro_batches": self.parallel.program.micro_batches,
            "spans": self._spans(mesh.pp.size),
            "steps": [
                {
                    "seconds": {" ".join(label): each for label, each in step.seconds.items()},
                    "sent": {" ".join(key): each for key, each in step.sent.items()},
                    "calls": step.calls,
                    "between": step.between_seconds,
                    "examples": step.examples,
                }
                for step in self.steps
            ],
        }

    def _spans(self, stages: int) -> list[tuple[str, float]]:
        """Return the spans of the last step on the first rank of each stage; nothing on others, of which there may be
        thousands."""
        joined = dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        if rank % max(1, ranks // stages) or not self.steps:
            return []
        return [(" ".join(label).strip(), seconds) for label, seconds in self.steps[-1].spans]


def _axes(mesh: MeshHandle) -> dict[str, str]:
    """Names of process groups -> mesh axes; the parts of the data axis (HSDP) count as it."""
    names: dict[str, str] = {}
    if dist.group.WORLD is not None:
        names[str(dist.group.WORLD.group_name)] = "all"
    for name in (*mesh.state_axes, *mesh.axes):
        names |= dict.fromkeys(mesh.group_names(name), name if name in mesh.axes else DATA_AXIS)
    if mesh.pp.size > 1:
        names |= dict.fromkeys(mesh.group_names(mesh.pp.name), mesh.pp.name)
    return names


def _examples(arguments: Any) -> int:
    """Return the size of the global batch: that of the first tensor, times the data ranks where each passes its own part."""
    args, _ = arguments
    first = next((int(each.shape[0]) for each in _tensors(arguments) if each.dim()), 0)
    return first * (args[0].times if len(args) == 1 and isinstance(args[0], LocalBatch) else 1)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    """Return the tensors of a call; a `LocalBatch` or `NamedBatch` is a dict that pytrees do not know."""
    args, _ = arguments
    tree = dict(args[0]) if len(args) == 1 and isinstance(args[0], dict) else arguments
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]
