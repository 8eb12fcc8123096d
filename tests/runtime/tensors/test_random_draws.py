"""Random numbers for DTensors are those of the whole tensor, for each operation that torch tags as random (seen on 2.13.0)."""

from __future__ import annotations

from typing import Any

import torch
from support.harness.rank_pool import RankPool
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.runtime.compat.dtensor import local_of, own_part, strided_shard
from autopar.runtime.compat.torch_operations import random_operations
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.patches import apply_patches

NO_TENSOR = ("rand", "randn", "randint", "randperm", "normal.float_float", "gru", "lstm", "rnn", "miopen", "cudnn")
"""Of sizes, or of several layers: no shard comes to them but in inference mode."""


def argument(kind: str, name: str, x: torch.Tensor) -> Any:
    """A value for an argument without a default."""
    if kind == "Tensor":
        return x.clone()
    return {"float": 0.4, "bool": True, "bool?": True, "int": 3, "SymInt": 3 if name != "high" else 9, "Scalar": 0.4}[kind]


def results_of(op: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Whole tensors: what the operation returns, and what its arguments are afterwards."""
    words = [(str(each.type), each) for each in op._schema.arguments]
    wanted = [each for _, each in words if not each.kwarg_only and not each.has_default_value()]
    positional = [argument(str(each.real_type), each.name, x) for each in wanted]
    named = {each.name: x.clone() for kind, each in words if each.kwarg_only and kind == "Tensor"}
    torch.manual_seed(5)
    results = op(*positional, **named)
    every = [*(results if isinstance(results, (list, tuple)) else [results]), *positional, *named.values()]
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in every if isinstance(each, torch.Tensor)]


def different_operations() -> tuple[int, list[str]]:
    """How many operations were tried, and those that do not give the numbers of the whole tensor."""
    apply_patches()
    mesh = MeshHandle({"dp": 2, "tp": 2}).device_mesh
    x = torch.rand(6, 5, dtype=torch.float64)
    tried, wrong = 0, []
    for op in random_operations():
        name = str(op).removeprefix("aten.")
        if name.split(".")[0] in NO_TENSOR or name.startswith(NO_TENSOR[4:]):
            continue
        try:
            expected = results_of(op, x)
        except (RuntimeError, NotImplementedError, KeyError, IndexError):  # of a device, or of another kind of argument
            continue
        tried += 1
        found = results_of(op, distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
        if not all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found, expected, strict=True)):
            wrong.append(name)
    return tried, wrong


def test_each_random_operation_draws_for_the_whole_tensor(ranks: RankPool) -> None:
    for tried, wrong in ranks.run(different_operations):
        assert tried >= 55 and not wrong


def parts() -> list[bool]:
    """Of uneven and strided shards, and of two axes that shard one dimension."""
    mesh = MeshHandle({"dp": 2, "tp": 2}).device_mesh
    found = []
    for shape, placements in (
        ((7, 3), [Shard(0), Shard(1)]),
        ((7,), [Shard(0), Shard(0)]),
        ((1, 4), [Shard(0), Shard(1)]),
        ((12, 2), [Shard(1), strided_shard(0, 3)]),
    ):
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        shards = distribute_tensor(whole, mesh, placements)
        found.append(torch.equal(local_of(shards), own_part(shards, whole)))
    return found


def test_own_part_of_a_whole_tensor(ranks: RankPool) -> None:
    assert ranks.run(parts) == [[True] * 4] * 4
