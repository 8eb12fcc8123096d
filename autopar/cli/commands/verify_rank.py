"""One spawned process of ``autopar verify``. Imports torch, the program loader and the runtime only."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def work(rank: int, size: int, folder: str) -> None:
    """Reads `folder`/job.pt, runs one step, and on rank 0 writes `folder`/result.pt."""
    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle, shut_down
    from autopar.runtime.parallel import Parallel

    torch.set_num_threads(1)
    # DTensor warns that gathering a strided shard is slow; here that is only done to compare.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        job = torch.load(Path(folder) / "job.pt", weights_only=True, mmap=True)
        program_class = load_program(job["program"]).Program
        parallel = Parallel(program_class(MeshHandle(program_class.mesh_axes)), job["state"]).train(job["training"])
        result = step(parallel, job["batch"], job["learning_rate"])
        if rank == 0:
            torch.save(result, Path(folder) / "result.pt")
    except BaseException:
        dist.destroy_process_group()
        raise
    shut_down()


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor], learning_rate: float) -> dict[str, Any]:
    """Loss, every gradient and every parameter after one step of SGD, as full tensors by name. Collective on a parallel model,
    which gives all stages' on every rank."""
    from autopar.runtime.parallel import Parallel

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    out = model(**batch)
    if isinstance(model, Parallel):
        loss = out if isinstance(out, torch.Tensor) else out.loss
    else:
        from autopar.capture.returned import take_apart  # not on ranks

        loss = take_apart(out, ()).loss
    loss.backward()
    if isinstance(model, Parallel):
        gradients = model.full_gradients()
        optimizer.step()
        return {"loss": loss.detach(), "gradients": gradients, "parameters": model.full_state()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = {name: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()}
    optimizer.step()
    return {"loss": loss.detach(), "gradients": gradients, "parameters": {name: p.detach() for name, p in trained.items()}}
