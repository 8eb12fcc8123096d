"""Ring attention of packed documents on real ranks, against all scores in one process; and what travels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.oracles import dense_attention
from torch import Tensor

from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle


@dataclass(frozen=True)
class Case:
    """Rows of documents in lengths, as packing makes them, or `scattered`: tokens of documents lie anywhere. `positions`: their
    positions count; else a token sees all of its document."""

    rows: tuple[tuple[int, ...], ...] = ((5, 11, 16), (32,))
    heads: tuple[int, int] = (4, 2)
    positions: bool = True
    scattered: bool = False
    window: tuple[int, int] | None = None
    value: int = 8

    def tensors(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """q, k, v and what the result is multiplied by; documents and positions, of queries and keys."""
        torch.manual_seed(0)
        length, (h, g) = sum(self.rows[0]), self.heads
        shapes = ((2, h, length, 8), (2, g, length, 8), (2, g, length, self.value), (2, h, length, self.value))
        documents = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in self.rows])
        positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in self.rows])
        if self.scattered:
            order = torch.randperm(length)
            documents, positions = documents[:, order], positions[:, order]
        more = [positions, positions] if self.positions else [None, None]
        return [torch.randn(shape, dtype=torch.float64) for shape in shapes], [documents, documents, *more]


CASES = {
    "packed": Case(),
    "short documents": Case(rows=((1, 2, 3, 4, 5, 6, 7, 4), (4,) * 8)),
    "one row of numbers": Case(rows=((9, 7, 16),)),
    "window": Case(window=(3, 0)),
    "without positions": Case(positions=False),
    "scattered": Case(scattered=True),
    "scattered, window": Case(scattered=True, window=(4, 0)),
    "scattered, without positions": Case(scattered=True, positions=False),
    "narrow values": Case(heads=(4, 4), value=4),
}


def outcome(function: Any, tensors: list[Tensor]) -> list[Tensor]:
    *leaves, weight = tensors
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def on_rank(cases: list[dict[str, Any]], compiled: bool) -> list[list[Tensor]]:
    """On a rank: the result of its part of each case, and its gradients."""
    axis, found = MeshHandle({"tp": torch.distributed.get_world_size()}).tp, []
    for case in (Case(**each) for each in cases):
        tensors, ids = case.tensors()
        parts = [x.chunk(axis.size, 2)[axis.coordinate] for x in tensors]
        own = [None if x is None else x.chunk(axis.size, 1)[axis.coordinate] for x in ids]

        def run(q: Tensor, k: Tensor, v: Tensor, own: Any = own, window: Any = case.window) -> Tensor:
            return C.attention_documents_ring(q * 1.0, k, v, *own, window=window, axis=axis)

        found.append(outcome(torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run, parts))
    return found


def compare(ranks: RankPool, cases: dict[str, Case], world: int, compiled: bool = False) -> None:
    answers = ranks.run(on_rank, [asdict(case) for case in cases.values()], compiled, world=world, timeout=120)
    for index, (title, case) in enumerate(cases.items()):
        tensors, ids = case.tensors()

        def whole(q: Tensor, k: Tensor, v: Tensor, ids: Any = ids, window: Any = case.window) -> Tensor:
            return dense_attention.documents(q, k, v, *ids, window=window)

        right = outcome(whole, tensors)
        for which, wanted in enumerate(right):
            found = torch.cat([answer[index][which] for answer in answers], 2)
            error = float((found - wanted).abs().max())
            assert found.shape == wanted.shape and error <= 1e-12, f"{title}, {('result', *'qkv')[which]}: {error}"


@pytest.mark.parametrize("world", [2, 4])
def test_equals_one_process(ranks: RankPool, world: int) -> None:
    compare(ranks, CASES, world)


def test_eight_ranks(ranks: RankPool) -> None:
    compare(ranks, {name: CASES[name] for name in ("packed", "short documents", "scattered, window")}, 8)


def test_compiled(ranks: RankPool) -> None:
    compare(ranks, {name: CASES[name] for name in ("packed", "without positions")}, 2, compiled=True)


def sent(rows: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """On a rank: elements of keys and values, and of their gradients, that it sends."""
    from autopar.runtime.ops.attention import ring

    counts: list[int] = []
    original = ring.all_to_all_rows

    def counted(flat: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        counts.append(sum(send))
        return original(flat, receive, send, group)

    ring.all_to_all_rows = counted
    try:
        (result,) = on_rank([asdict(Case(rows=rows))], False)
        assert result
    finally:
        ring.all_to_all_rows = original
    return sum(counts), len(counts)


@pytest.mark.parametrize(
    ("rows", "pairs", "steps"),
    [
        (((8, 8, 8, 8), (8, 8, 8, 8)), 0, 0),  # every document on one rank
        (((8, 8, 8, 8), (8, 6, 10, 8)), 1, 1),  # one reaches from rank 1 to rank 2
        (((16, 16), (8, 8, 16)), 2, 1),  # ranks 1 and 3 see the rank before
        (((32,), (8, 8, 8, 8)), 6, 3),  # causal: every rank sees all before it
    ],
)
def test_keys_travel_to_ranks_with_their_documents(
    ranks: RankPool, rows: tuple[tuple[int, ...], ...], pairs: int, steps: int
) -> None:
    answers = ranks.run(sent, rows, world=4)
    block = 2 * 2 * 8 * (8 + 8)  # rows, key heads, tokens, keys and values
    assert sum(elements for elements, _ in answers) == pairs * block * 3  # forward; backward, and gradients back
    assert {count for _, count in answers} == {3 * steps}
