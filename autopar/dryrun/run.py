"""The dry run: builds a plan's program as `api.parallelize` does, on fake tensors, and runs steps under a memory watch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autopar.cost_models.hardware.allocator import communicator_count, device_memory
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.state_group import is_matrix
from autopar.cost_models.step.stage_devices import stage_clusters
from autopar.dryrun.compat import FakeMode, LiveStorage, MemoryWatch, fake_group
from autopar.errors import AutoparError
from autopar.ir import dims
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import build_program
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.device.offload import HostMemory
from autopar.runtime.parallel import Parallel
from autopar.runtime.state.parameter_table import parameter_index
from autopar.runtime.step.inputs import NamedBatch

KINDS = ("parameters", "buffers", "optimizer", "gradients", "gathered", "reduced", "activations", "temporaries", "inputs")


@dataclass(frozen=True, slots=True)
class CollectiveTotal:
    """The collectives of one kind on one mesh axis in one step: how many, and their bytes (the larger side of each)."""

    kind: str
    axis: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Live tensors of one kind that were allocated at one place."""

    kind: str
    allocated_at: str
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class DryRun:
    """The result of a dry run. `peak_bytes` are live after `function` in `module` (at `line` of the program if it is in a
    forward); `memory` has them by kind, `tensors` by place, largest first. `host_bytes`: the peak of offloaded bytes.
    `reserved_bytes`, `shown_bytes`: what the allocator would reserve on the plan's devices, and the device show (0 where the plan
    does not describe them)."""

    rank: int
    coordinates: tuple[tuple[str, int], ...]
    peak_bytes: int
    function: str
    module: str
    line: str
    memory: dict[str, int]
    tensors: tuple[TensorGroup, ...]
    collectives: tuple[CollectiveTotal, ...]
    host_bytes: int = 0
    reserved_bytes: int = 0
    shown_bytes: int = 0


def dry_run(plan: Plan, rank: int = 0) -> DryRun:
    """Run the program on one rank of the plan's cluster. AutoparError if the plan has no such rank."""
    candidate = plan.candidate
    check_rank(plan, rank)
    module = build_program(plan.graph, candidate)
    foreach = plan.document.cluster.description.get("device", {}).get("kind") != "cpu"
    with fake_group(rank, candidate.devices):
        mesh = MeshHandle(module.Program.mesh_axes)
        mesh.host_memory = host = FakeHostMemory()
        program = module.Program(mesh)
        specs = parameter_index(program.roots()).specs
        with FakeMode():
            parallel = Parallel(program, lambda name: torch.empty(specs[name].shape, dtype=getattr(torch, specs[name].dtype)))
            for bucket in parallel.state.buckets.buckets:
                bucket.reuse_flat = not foreach  # as on the plan's devices, not on this CPU
            batch = {
                value.name: torch.empty(dims.shape_at(value.shape, candidate.batch), dtype=getattr(torch, value.dtype))
                for value in plan.graph.inputs
            }
            result = watch_steps(parallel, batch, make_optimizer(plan.document.optimizer, parallel, foreach), rank)
            return replace(_on_device(plan, result), host_bytes=host.peak_bytes)


def check_rank(plan: Plan, rank: int) -> None:
    """Raise an AutoparError where the plan has no such rank, or nothing trains: torch's tracker fails on frozen parameters."""
    candidate = plan.candidate
    if plan.graph.forward_only:
        raise AutoparError("a dry run is of a training step, and nothing trains in this plan: see `autopar inspect --memory`")
    if not 0 <= rank < candidate.devices:
        raise AutoparError(f"rank {rank} is not in the plan, which has ranks 0 to {candidate.devices - 1}")


def _on_device(plan: Plan, result: DryRun) -> DryRun:
    """Return the result with what the tensors take on a device of the plan's cluster, by the planner's allocator model."""
    description, candidate = plan.document.cluster.description, plan.candidate
    if not description:
        return result
    cluster = stage_clusters(Cluster.from_dict(description), candidate.pipeline.stages)[result.rank // candidate.mesh.size]
    communicators = communicator_count(candidate.mesh, candidate.zero_group, candidate.pipeline.stages)
    memory = device_memory(result.memory, cluster.device, communicators)
    return replace(result, reserved_bytes=round(memory.reserved), shown_bytes=round(memory.shown))


class FakeHostMemory(HostMemory):
    """Host memory without data, so that offloaded tensors do not count as device memory. `bytes` are offloaded now, `peak_bytes`
    were the most. The program frees a tensor at once when it is offloaded, as on a CPU; a
    GPU holds it until the copy has ended."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.bytes = self.peak_bytes = 0

    def copy_to_host(self, x: torch.Tensor) -> torch.Tensor:
        self.bytes += x.numel() * x.element_size()
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return torch.empty(1, dtype=x.dtype).expand(x.shape)

    def copy_to_device(self, on_host: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, None]:
        self.bytes -= on_host.numel() * on_host.element_size()
        return torch.empty(on_host.shape, dtype=on_host.dtype, device=device), None


def watch_steps(parallel: Parallel, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, rank: int) -> DryRun:
    """Run three steps: the first has no optimizer state, the second finds the peak, the third lists what is live there. Also runs
    on real tensors, on every rank at once."""
    watch = MemoryWatch()
    watch.track_external(parallel, *batch.values())
    groups: list[TensorGroup] = []
    with watch:
        for step in range(3):
            watch.start_step(forget_peak=step == 1)
            if step == 2:
                watch.at_operation = watch.peak.operation, lambda: groups.extend(_sums(watch.live(), parallel, optimizer, batch))
            result = parallel(NamedBatch(batch))
            loss = result if isinstance(result, torch.Tensor) else result.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    mesh, peak = parallel.program.mesh, watch.peak
    stages = (mesh.pp.name,) if mesh.pp.size > 1 else ()
    axes = {group: name for name in (*mesh.axes, *mesh.state_axes, *stages) for group in mesh.group_names(name)}
    sent = tuple(
        CollectiveTotal(kind, axes.get(group, "all"), *numbers) for (kind, group), numbers in sorted(watch.collectives.items())
    )
    stage = ((mesh.pp.name, mesh.pp.coordinate),) if mesh.pp.size > 1 else ()
    where = (*stage, *((name, mesh.axis(name).coordinate) for name in mesh.axes))
    memory = {kind: sum(each.bytes for each in groups if each.kind == kind) for kind in KINDS}
    return DryRun(
        rank=rank,
        coordinates=where,
        peak_bytes=peak.bytes,
        function=peak.function,
        module=peak.module,
        line=peak.line,
        memory=memory,
        tensors=tuple(groups),
        collectives=sent,
    )


class _MuonAndAdamW(torch.optim.AdamW):
    """Muon of what a plan takes for matrices, and AdamW of the rest."""

    def __init__(self, parameters: list[torch.nn.Parameter], foreach: bool | None) -> None:
        super().__init__([each for each in parameters if not is_matrix(each.shape)] or [torch.zeros(0)], foreach=foreach)
        self.muon = torch.optim.Muon([each for each in parameters if is_matrix(each.shape)] or [torch.zeros(0, 0)])

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.muon.step()
        self.state.update(self.muon.state)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.muon.zero_grad(set_to_none)


def make_optimizer(name: str, parallel: Parallel, foreach: bool | None) -> torch.optim.Optimizer:
    """Return the optimizer that a plan names; AdamW, as which it is priced, if torch has none of that name."""
    parameters = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    match name:
        case "sgd" | "momentum":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9 if name == "momentum" else 0.0, foreach=foreach)
        case "adam":
            return torch.optim.Adam(parameters, foreach=foreach)
        case "adagrad":
            return torch.optim.Adagrad(parameters, foreach=foreach)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, foreach=foreach)
        case "muon":
            return _MuonAndAdamW(parameters, foreach)
    return torch.optim.AdamW(parameters, foreach=foreach)


def _sums(
    live: list[LiveStorage], parallel: Parallel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]
) -> list[TensorGroup]:
    """Return the live tensors by kind and place, largest first."""
    places: dict[int, str] = {}
    places.update((_storage(tensor), "inputs") for tensor in batch.values())
    places.update((_storage(tensor), "buffers") for tensor in parallel.state.buffers.values())
    places.update((_storage(tensor), "parameters") for tensor in parallel.state.parameters.values())
    gradients = (parameter.grad for parameter in parallel.state.parameters.values())
    places.update((_storage(tensor), "gradients") for tensor in gradients if tensor is not None)
    for state in optimizer.state.values():
        places.update((_storage(tensor), "optimizer") for tensor in state.values() if isinstance(tensor, torch.Tensor))
    sums: dict[tuple[str, str], list[int]] = {}
    for each in live:
        kind = places.get(each.storage) or _kind(each)
        entry = sums.setdefault((kind, each.allocated_at if kind not in places.values() else ""), [0, 0])
        entry[0] += 1
        entry[1] += each.bytes
    groups = [TensorGroup(kind, allocated_at, count, bytes_) for (kind, allocated_at), (count, bytes_) in sums.items()]
    return sorted(groups, key=lambda each: -each.bytes)


def _kind(live: LiveStorage) -> str:
    if "fsdp" in live.allocated_at:
        return "reduced" if "reduce" in live.allocated_at else "gathered"
    if "optim" in live.allocated_at:
        return "temporaries"
    return "activations" if live.allocated_at and live.use == "Activation" else "temporaries"


def _storage(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
