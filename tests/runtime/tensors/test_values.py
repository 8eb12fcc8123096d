"""What is computed of sharded parameters has the values and gradients of whole tensors (DTensor of 2.13.0 gets some wrong)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from torch import nn
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
torch.stack([p.norm(), q.norm()]).sum()
torch.stack([p.norm(), q.norm()]).norm()
torch.cat([p.norm(dim=0), q.norm(dim=0)]).sum()
torch.stack(torch._foreach_norm([p, q])).sum()
p.norm(dim=0).sum()
p.norm(1, dim=1).mean() + q.norm(3, dim=0, keepdim=True).sum()
p.norm().expand(3).sum()
p.norm(dim=0)[1:].sum() ** 2
p.norm(float("inf")) + q.norm(-float("inf"))
p.sum(())
p.mean((), keepdim=True)
p.detach().std(())
p.norm() + 1
p.norm() * 2 - q.norm()
p.norm() > q.norm()
torch.dist(p, q).expand(2).sum()
torch.linalg.vector_norm(p, 0, dim=0).sum()
torch.linalg.vector_norm(p, float("inf"), dim=0).sum()
p.abs().amax(0).sum()
p.max(0).values.sum() + p.min(1).values.mean()
p.max() - p.min()
torch.stack([p.max(), q.max()]).sum()
torch.stack(p.detach().aminmax()).sum()
p.detach().prod(0).sum()
(p.abs() > 1).any(0).sum()
(p.abs() > 0.1).any(0).float()
(p.abs() > 0.1).any(1) * 2
~(p.abs() > 0.1).any(1)
(p.abs() > 0.1).any().int()
(p.abs() > 0.3).all(0).sum()
(p > 0).all(1).float().mean()
torch.isfinite(p).all().float() * 3
(p > 0).sum(0).float().std()
torch.count_nonzero(p > 0) * 2
p.mean(0).sum() + p.mean().expand(3).sum()
p.std() + p.var(correction=0) + p.median()
p.detach().sum(0).norm() + p.detach().mean(0).norm()
p.logsumexp(0).sum() + p.softmax(0).norm(dim=1).sum()
torch.nanmean(p) * 2
F.cosine_similarity(p, q).sum()
F.normalize(p).sum()
p.nansum() + p.cumsum(0).sum()
(p.flatten() * q.view(-1)).sum()
p.t().reshape(-1)[2:].norm()
torch.cat([p.view(-1), q.flatten()]).square().sum()
torch.nn.utils.parameters_to_vector([p, q]).norm()
p.detach().flatten().topk(2).values
p.abs().flatten().topk(3).values.sum()
p.detach().flatten().sort().values
p.detach().flatten().kthvalue(2).values
torch.quantile(p.detach(), 0.3)
torch.histc(p.detach(), 3)
p.view(-1, 1).t()
p.unsqueeze(0).flatten(0, 1)
p.reshape(1, -1).expand(2, -1).sum(0)
p.unflatten(0, (1, -1)).flatten(1)
(p.t() @ p - torch.eye(len(p.t()))).norm()
(p @ p.t()).norm(1) + torch.linalg.matrix_norm(p.t() @ q)
p.mv(w[0]).norm() + (p.t() @ w[:, 0]).norm(dim=0) + (w @ p.t()).norm()
torch.dist(p, w) + torch.cdist(p, q).sum() + torch.cdist(w, p).sum()
F.cross_entropy(p, w[:, 0].long().remainder(2)) + F.mse_loss(p @ p.t(), torch.eye(len(p)))
torch.pdist(p).sum() + torch.block_diag(p, q).norm() + p.unfold(1, 2, 1).square().sum()
torch.histogram(p.detach(), 5)[0]
torch.quantile(p, w[0].sigmoid()).sum()
torch.nanquantile(p.detach(), w[0].sigmoid(), dim=0)
p.detach().unique()
torch.unique(p.detach().round(), return_inverse=True)[1]
torch.bucketize(p.detach(), w[0].sort().values)
torch.searchsorted(p.detach().sort().values, w[:, :1].contiguous())
torch.take(p, ids).sum() + p.gather(1, ids[:1, None] * 0).sum()
p.scatter(0, ids[None] * 0, w[:1]).square().sum()
p.index_add(0, ids, w[ids]).square().sum()
F.conv2d(p[None, None], w[None, None, :1, :2]).norm() + F.conv2d(w[None, None], p[None, None]).norm()
torch.addr(w, p[:, 0], q[0]).norm() + torch.baddbmm(w[None] @ w.t(), p[None], q.t()[None]).norm()
p.detach().mv(w[0])
p.detach() @ w.t() + w @ p.detach().t()
F.linear(w, p.detach())
F.linear(p.detach(), w, w[:, 0])
F.embedding(ids, p.detach())
F.embedding(ids, p.detach()).sum(0).norm() * 2
p.index_select(0, ids)
p[ids]
p[[0, -1, 0]] * 2
p[:, [0, 2]].sum()
p.detach().masked_fill(w > 0, 0.0)
torch.where(w > 0, p.detach(), w)
torch.cat([p.detach(), w]).norm()
torch.stack([w, p.detach()]).sum(0)
torch.allclose(p, q) or torch.allclose(q, q * 1)
torch.allclose(p, w) or torch.allclose(q, w)
torch.isclose(p.detach(), w)
sum(row.norm() for row in p)
torch.stack(p.unbind(1)).square().sum()
sum(each.sum() for each in q.t().unbind())
float(f"{p.mean():.4f}")
float(f"{p.norm() ** 2 + 1:9.3e}")
float(f"{p.sum()}")
"""


def value(x: Any) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else torch.as_tensor(x)


def results(line: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The value of an expression, and its gradients where it has any. `w` and `ids` are ordinary tensors."""
    leaves = [each.detach().requires_grad_() for each in tensors]
    plain = {"w": value(leaves[1].detach()), "ids": torch.tensor([0, len(tensors[0]) - 1, 0])}
    found = eval(line, {"torch": torch, "F": F, "p": leaves[0], "q": leaves[1], **plain})
    if isinstance(found, torch.Tensor) and found.requires_grad:
        (found * 3).sum().backward()
    return [value(found), *(value(each.grad) for each in leaves if each.grad is not None)]


def different_values() -> list[str]:
    apply_patches()
    mesh = init_device_mesh("cpu", (2,))
    wrong = []
    for shape in ((4, 4), (5, 3), (1, 3)):
        torch.manual_seed(0)
        whole = torch.randn(2, *shape, dtype=torch.float64)
        for dim in (0, 1):
            shards = [distribute_tensor(each, mesh, [Shard(dim)]) for each in whole]
            for line in EXPRESSIONS.strip().splitlines():
                try:
                    torch.testing.assert_close(results(line, *shards), results(line, *whole), rtol=1e-12, atol=1e-12)
                except Exception as error:
                    wrong.append(f"{line} of {shape} by {dim}: {error}")
    return wrong


def test_values_are_those_of_whole_tensors(ranks: RankPool) -> None:
    for wrong in ranks.run(different_values, world=2):
        assert not wrong, "\n".join(wrong)


def lookups() -> list[str]:
    """The placements of rows, by ids of another rank's examples, or of columns that are sharded."""
    apply_patches()
    mesh = init_device_mesh("cpu", (2,))
    rows, ids = torch.ones(6, 4), torch.arange(6)
    examples, all_ids = (distribute_tensor(ids, mesh, [each]) for each in (Shard(0), Replicate()))
    columns = distribute_tensor(rows, mesh, [Shard(1)])
    found = (
        F.embedding(examples, distribute_tensor(rows, mesh, [Replicate()])),
        F.embedding(all_ids, columns), columns.index_select(0, all_ids), columns[all_ids],
    )  # fmt: skip
    return [str(each.placements[0]) for each in found if isinstance(each, DTensor)]


def test_lookups_keep_the_shards_of_other_models(ranks: RankPool) -> None:
    """What is taught to DTensor holds in the whole process."""
    assert ranks.run(lookups, world=2) == [["S(0)", "S(1)", "S(1)", "S(1)"]] * 2


def penalty_of_a_parameter() -> None:
    """On a rank: it is added into a loss in each step, and has no more hooks for it."""
    apply_patches()
    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.tensor([2.0]), mesh, [Replicate()]))
    for _ in range(3):
        p.grad, loss = None, torch.zeros(1)
        loss += p
        (loss * 3).sum().backward()
        assert p.grad is not None and p.grad.full_tensor().item() == 3 and len(p._backward_hooks or {}) == 1


def test_a_penalty_leaves_one_hook(ranks: RankPool) -> None:
    ranks.run(penalty_of_a_parameter, world=2)
