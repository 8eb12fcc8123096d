"""One spawned process of ``autopar verify``. Imports torch, the program loader and the runtime only."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def work(rank: int, size: int, folder: str) -> None:
    """Read `folder`/job.pt, make its runs, and on rank 0 writes `folder`/result.pt."""
    from autopar.runtime.device.mesh import shut_down

    torch.set_num_threads(1)
    # DTensor warns that gathering a strided shard is slow; here that is only done to compare.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        job = torch.load(Path(folder) / "job.pt", weights_only=True, mmap=True)
        if job["source"]:
            from autopar.capture.models import load_model
            from autopar.ops.opaque import whole_modules

            job["opaque_modules"] = whole_modules(load_model(job["source"], *job["sizes"]).model)
        results = make_runs(job)
        if rank == 0:
            torch.save(results, Path(folder) / "result.pt")
    except BaseException:
        dist.destroy_process_group()
        raise
    shut_down()


def make_runs(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run the job on a rank of a process group: what each run of the job gives, as full tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, job["default_dtype"]) if job["default_dtype"] else before)
    try:
        return [_run(job, each) for each in job["runs"]]
    finally:
        torch.set_default_dtype(before)


def _run(job: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel
    from autopar.runtime.step.inputs import NamedBatch

    program_class = load_program(run["program"]).Program
    program_class.input_shapes = {  # what was drawn need not have the size of the batch in front
        name: shape for name, shape in program_class.input_shapes.items() if name not in run["given"]
    }
    state = {name: tensor.clone() for name, tensor in job["state"].items()}
    mesh = MeshHandle(program_class.mesh_axes)
    mesh.opaque_modules = job.get("opaque_modules", {})
    parallel = Parallel(program_class(mesh), state).train(run["training"])
    with nullcontext() if run["backward"] else torch.no_grad():
        result = parallel(NamedBatch(run["batch"]))
    outputs = {} if isinstance(result, Tensor) else {path: result.__dict__[path] for path in program_class.outputs}
    loss = (result if isinstance(result, Tensor) else result.loss) if program_class.has_loss else weighted_sum(outputs.values())
    out = {"loss": loss.detach(), "outputs": {path: tensor.detach() for path, tensor in outputs.items() if tensor is not None}}
    if not run["backward"]:
        return out
    trained = [p for p in parallel.parameters() if p.requires_grad]
    if loss.requires_grad:
        loss.backward()
    out["gradients"] = parallel.full_gradients()
    if trained:
        torch.optim.SGD(trained, lr=job["learning_rate"]).step()
    return out | {"state": parallel.full_state()}


def weighted_sum(outputs: Any) -> Tensor:
    """A loss for a model that returns none: its outputs, weighted at random but the same on both sides (a plain sum has no
    gradient where the outputs are normalised)."""
    tensors: Sequence[Tensor] = [tensor for tensor in outputs if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    total = torch.zeros((), dtype=torch.float64)
    for number, tensor in enumerate(tensors):
        weights = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64) + 0.5
        part = (tensor * weights.to(tensor.dtype)).sum() / max(tensor.numel(), 1)
        total = part if number == 0 else total + part
    return total
