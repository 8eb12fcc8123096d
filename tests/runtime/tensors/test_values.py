"""What is computed of sharded parameters has the values and gradients of whole tensors (DTensor of 2.13.0 gets some wrong)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from autopar.runtime.patches import apply_patches

EXPRESSIONS = """
F.mse_loss(p, q)
F.mse_loss(p, q, reduction="sum")
F.mse_loss(p, q, reduction="none").square().sum()
F.mse_loss(p, q, weight=q.detach().abs())
F.l1_loss(p, q)
F.smooth_l1_loss(p, q)
F.huber_loss(p, q, delta=0.5) * 2
F.soft_margin_loss(p, q.detach().sign())
F.binary_cross_entropy(p.sigmoid(), q.detach().sigmoid())
F.binary_cross_entropy_with_logits(p, q.detach().sigmoid())
F.kl_div(p.log_softmax(-1), q.softmax(-1))
"""


def value(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x)


def results(line: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The value of an expression, and its gradients where it has any."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    found = eval(line, {"torch": torch, "F": F, "p": leaves[0], "q": leaves[1]})
    if isinstance(found, torch.Tensor) and found.requires_grad:
        (found * 3).sum().backward()
    return [value(found), *(value(each.grad) for each in leaves if each.grad is not None)]


def different_values() -> list[str]:
    apply_patches()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    wrong = []
    for shape in ((4, 4), (5, 3)):
        torch.manual_seed(0)
        whole = torch.randn(2, *shape, dtype=torch.float64)
        for places in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0)), (Replicate(), Shard(1))):
            shards = [distribute_tensor(each, mesh, places) for each in whole]
            for line in EXPRESSIONS.strip().splitlines():
                try:
                    torch.testing.assert_close(results(line, *shards), results(line, *whole), rtol=1e-12, atol=1e-12)
                except (AssertionError, RuntimeError, TypeError) as error:
                    wrong.append(f"{line} of {shape} in {places}: {error}")
    return wrong


def test_values_are_those_of_whole_tensors(ranks: RankPool) -> None:
    assert ranks.run(different_values, world=4) == [[]] * 4
