"""Named functions on real ranks against their single-process meaning in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool

from autopar.runtime import collectives as C
from autopar.runtime.device.axis import AxisHandle
from autopar.runtime.device.mesh import MeshHandle

V = 24


def loss_on_rank(
    axes: dict[str, int], logits: torch.Tensor, target: torch.Tensor, ignore: int, smoothing: float, backend: str = ""
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over valid tokens, batch over dp and classes over tp, and the gradient of this rank's logits."""
    mesh = MeshHandle(axes)
    dp, tp = mesh.dp, mesh.tp

    def mean(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = C.cross_entropy_sharded(x, target, ignore, smoothing, tp)
        total = C.convert(total, dp, "P -> I")
        return total / C.convert(C.count_valid(target, ignore), dp, "P -> R")

    rows = logits.chunk(dp.size)[dp.coordinate].chunk(tp.size, -1)[tp.coordinate].clone().requires_grad_()
    run = torch.compile(mean, backend=backend, fullgraph=True) if backend else mean
    loss = run(rows, target.chunk(dp.size)[dp.coordinate])
    (3 * loss).backward()
    return loss.detach(), rows.grad


@pytest.mark.parametrize("axes", [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}])
@pytest.mark.parametrize(
    ("backend", "smoothing"), [("", 0.0), ("", 0.1), pytest.param("aot_eager", 0.0, marks=pytest.mark.slow), ("aot_eager", 0.1)]
)
def test_cross_entropy_with_uneven_valid_tokens(ranks: RankPool, axes: dict[str, int], smoothing: float, backend: str) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(8, 5, V, dtype=torch.float64) * 30).requires_grad_()
    target = torch.randint(V, (8, 5))
    target[0], target[1, :3], target[6, 2] = -100, -100, -100
    loss = F.cross_entropy(logits.reshape(-1, V), target.reshape(-1), label_smoothing=smoothing)
    (3 * loss).backward()
    assert logits.grad is not None
    dp, tp = axes.get("dp", 1), axes.get("tp", 1)
    answers = ranks.run(loss_on_rank, axes, logits.detach(), target, -100, smoothing, backend)
    for rank, (got, gradient) in enumerate(answers):
        torch.testing.assert_close(got, loss.detach(), rtol=1e-12, atol=1e-12)
        expected = logits.grad.chunk(dp)[rank // tp].chunk(tp, -1)[rank % tp]
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-13)


def test_all_tokens_ignored_gives_zero_gradients(ranks: RankPool) -> None:
    logits, target = torch.randn(4, V, dtype=torch.float64), torch.full((4,), 7)
    for loss, gradient in ranks.run(loss_on_rank, {"tp": 4}, logits, target, 7, 0.0):
        assert loss.isnan() and gradient.isnan().all() or gradient.eq(0).all()


def log_probs_on_rank(logits: torch.Tensor, index: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    tp = MeshHandle({"tp": 4}).tp
    mine = logits.chunk(tp.size, -1)[tp.coordinate].clone().requires_grad_()
    run = torch.compile(C.token_log_probs_sharded, backend=backend, fullgraph=True) if backend else C.token_log_probs_sharded
    found = run(mine, index, tp)
    (found * torch.arange(found.numel(), dtype=found.dtype).view(found.shape)).sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_log_probabilities_of_tokens(ranks: RankPool, backend: str) -> None:
    logits = (torch.randn(3, 5, V, dtype=torch.float64) * 30).requires_grad_()
    index = torch.randint(V, (3, 5, 1))
    expected = logits.log_softmax(-1).gather(-1, index)
    torch.testing.assert_close(C.token_log_probs(logits, index), expected)
    (expected * torch.arange(15, dtype=torch.float64).view(3, 5, 1)).sum().backward()
    assert logits.grad is not None
    answers = ranks.run(log_probs_on_rank, logits.detach(), index, backend)
    for got, _ in answers:
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([each for _, each in answers], -1), logits.grad, rtol=1e-10, atol=1e-13)


def logsumexp_on_rank(x: torch.Tensor, keep: bool, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    tp = MeshHandle({"tp": 4}).tp
    mine = x.chunk(tp.size, -1)[tp.coordinate].clone().requires_grad_()
    run = torch.compile(C.logsumexp_sharded, backend=backend, fullgraph=True) if backend else C.logsumexp_sharded
    found = run(mine, (2,), keep, axis=tp)
    (found * torch.arange(found.numel(), dtype=found.dtype).view(found.shape)).sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad


@pytest.mark.parametrize(("keep", "backend"), [(False, ""), (True, "aot_eager")])
def test_logsumexp(ranks: RankPool, keep: bool, backend: str) -> None:
    x = (torch.randn(3, 5, V, dtype=torch.float64) * 300).requires_grad_()
    expected = x.logsumexp(-1, keep)
    (expected * torch.arange(15, dtype=torch.float64).view(expected.shape)).sum().backward()
    assert x.grad is not None
    answers = ranks.run(logsumexp_on_rank, x.detach(), keep, backend)
    for got, _ in answers:
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([each for _, each in answers], -1), x.grad, rtol=1e-10, atol=1e-13)


def logsumexp_of_integers(x: torch.Tensor) -> torch.Tensor:
    tp = MeshHandle({"tp": 2}).tp
    return C.logsumexp_sharded(x.chunk(tp.size, -1)[tp.coordinate], (1,), axis=tp)


def test_logsumexp_of_integers(ranks: RankPool) -> None:
    x = torch.randint(5, (3, V))
    for found in ranks.run(logsumexp_of_integers, x, world=2):
        torch.testing.assert_close(found, x.logsumexp(-1))


def lookup(axes: dict[str, int], ids: torch.Tensor, table: torch.Tensor, padding: int | None) -> Any:
    tp = MeshHandle(axes).tp
    mine = table.chunk(tp.size)[tp.coordinate].clone().requires_grad_()
    y = C.convert(C.embedding_sharded(ids, mine, tp, padding), tp, "P -> I")
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return y.detach(), mine.grad


@pytest.mark.parametrize("padding", [None, 3])
def test_embedding(ranks: RankPool, padding: int | None) -> None:
    ids, table = torch.tensor([[0, 3, 23, 11], [11, 3, 6, 17]]), torch.randn(V, 5, dtype=torch.float64, requires_grad=True)
    y = F.embedding(ids, table, padding)
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    assert table.grad is not None
    answers = ranks.run(lookup, {"tp": 4}, ids, table.detach(), padding)
    for got, _ in answers:
        torch.testing.assert_close(got, y.detach())
    torch.testing.assert_close(torch.cat([gradient for _, gradient in answers]), table.grad)


def of_uneven_shards(name: str, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """On a rank: a function of classes or rows that are as many as 7 examples of 3, which four data ranks have as 2, 2, 2, 1."""
    mesh = MeshHandle({"dp": 4}).for_variant(False, 7)
    whole, table, ids = uneven_operands()
    mine = table.split([3 * share for share in mesh.dp.shares])[mesh.dp.coordinate].clone().requires_grad_()
    run = torch.compile(UNEVEN[name], backend=backend) if backend else UNEVEN[name]
    found = run(whole, mine, ids, mesh.dp)
    (found * torch.arange(1, found.numel() + 1, dtype=found.dtype).view(found.shape)).sum().backward()
    assert mine.grad is not None
    return found.detach(), mine.grad


def uneven_operands() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, table = torch.randn(26, 5, generator=generator).split([5, 21])
    return x.double(), table.double(), torch.tensor([0, 6, 20, 18, 5])


UNEVEN: dict[str, Any] = {
    "cross_entropy": lambda x, w, ids, axis: C.cross_entropy_sharded(x @ w.t(), ids, -100, 0.1, axis),
    "in chunks": lambda x, w, ids, axis: C.linear_cross_entropy_sharded(x, w, None, ids, -100, 0.1, 2, axis),
    "log_probs": lambda x, w, ids, axis: C.token_log_probs_sharded(x @ w.t(), ids.unsqueeze(-1), axis),
    "embedding": lambda x, w, ids, axis: C.convert(C.embedding_sharded(ids, w, axis), axis, "P -> I"),
}


@pytest.mark.parametrize("backend", ["", "aot_eager"])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_shards(ranks: RankPool, name: str, backend: str) -> None:
    """Each rank took its own number of classes for that of all others."""
    x, table, ids = uneven_operands()
    table.requires_grad_()
    expected = UNEVEN[name](x, table, ids, AxisHandle(""))
    (expected * torch.arange(1, expected.numel() + 1, dtype=x.dtype).view(expected.shape)).sum().backward()
    assert table.grad is not None
    answers = ranks.run(of_uneven_shards, name, backend)
    for got, _ in answers:
        torch.testing.assert_close(got, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in answers]), table.grad, rtol=1e-10, atol=1e-13)


def test_half_precision_losses_are_float32() -> None:
    logits = torch.randn(6, V).bfloat16()
    loss = C.cross_entropy_sum(logits, torch.arange(6))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(logits.float(), torch.arange(6), reduction="sum"))


def test_linear_kn() -> None:
    x, w, b = torch.randn(2, 3, 4), torch.randn(4, 5), torch.randn(5)
    torch.testing.assert_close(C.linear_kn(x, w, b), x @ w + b)
    torch.testing.assert_close(C.linear_kn(x, w), x @ w)


def masks(axes: dict[str, int], seed: int, backend: str = "") -> list[torch.Tensor]:
    mesh = MeshHandle(axes, seed=0)
    mesh.reseed(seed)

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return C.dropout(x, 0.5, True, mesh, ("dp",)), C.dropout(x, 0.5, True, mesh, ("dp", "tp"))

    run = torch.compile(two, backend=backend, fullgraph=True) if backend else two
    x = torch.ones(64, requires_grad=True)
    a, b = run(x)
    (a.sum() + b.sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, (a + b).detach())
    c, _ = run(x)
    assert C.dropout(x, 0.5, False, mesh) is x
    return [a.detach(), b.detach(), c.detach()]


@pytest.mark.parametrize("backend", ["", "aot_eager"])
def test_dropout_masks(ranks: RankPool, backend: str) -> None:
    first, again, other = (ranks.run(masks, {"dp": 2, "tp": 2}, seed, backend) for seed in (1, 1, 2))
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(first[0][0], other[0][0])
    over_dp, over_both, later = zip(*first, strict=True)
    assert torch.equal(over_dp[0], over_dp[1]) and torch.equal(over_dp[2], over_dp[3]) and not torch.equal(over_dp[0], over_dp[2])
    assert len({tuple(mask.tolist()) for mask in over_both}) == 4
    assert not torch.equal(over_dp[0], later[0])
    assert set(over_dp[0].tolist()) == {0.0, 2.0}
