"""What a rank does with a program's text. Imports nothing but the runtime."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.program.build import load
from autopar.runtime.mesh import MeshHandle
from autopar.runtime.parallel import Parallel


def train_step(text: str, state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor], compile: str = "") -> Any:
    """Loss, full gradients and buffers by original name."""
    program = load(text).Program
    parallel = Parallel(program(MeshHandle(program.mesh_axes)), state, compile=compile)
    loss = parallel(**batch)
    loss.backward()
    gradients = {}
    for name, parameter in parallel.named_parameters():
        if parameter.grad is not None:
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor()
    return loss.item(), gradients, dict(parallel.named_buffers())


def train_steps(cases: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> list[Any]:
    """Several programs, one after another; an error names its case."""
    out = []
    for index, case in enumerate(cases):
        try:
            out.append(train_step(*case))
        except Exception as error:
            raise RuntimeError(f"case {index}: {error}\n{case[0]}") from error
    return out


def count_collectives(text: str, state: dict[str, torch.Tensor], batch: dict[str, torch.Tensor]) -> Counter[str]:
    """Functional collectives by kind in one forward and backward."""
    counts: Counter[str] = Counter()
    kinds = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "_c10d_functional":
                counts.update([kinds[name] for name in [func._schema.name.split("::")[1]] if name in kinds])
            return func(*args, **(kwargs or {}))

    program = load(text).Program
    parallel = Parallel(program(MeshHandle(program.mesh_axes)), state)
    with Counting():
        parallel(**batch).backward()
    return counts
