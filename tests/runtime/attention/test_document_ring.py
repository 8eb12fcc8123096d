"""Ring attention of packed documents on real ranks, against all scores in one process; and what travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.harness.rank_pool import RankPool
from support.oracles import dense_attention
from torch import Tensor

from autopar.operations.attention import LENT
from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.ops.attention.document_ring import DocumentRing
from autopar.runtime.ops.attention.document_runs import Document, PackedRuns, Run


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


def sent(rows: tuple[tuple[int, ...], ...]) -> dict[str, tuple[int, int]]:
    """On a rank: how many elements of keys and values, their gradients included, and of lent queries it sends, and how often."""
    from autopar.runtime.ops.attention import document_ring, ring

    counts: dict[str, list[int]] = {"keys": [], "queries": []}
    original = ring.all_to_all_rows

    def counted(kind: str) -> Any:
        def send(flat: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
            counts[kind].append(sum(send))
            return original(flat, receive, send, group)

        return send

    ring.all_to_all_rows, document_ring.all_to_all_rows = counted("keys"), counted("queries")
    try:
        (result,) = on_rank([asdict(Case(rows=rows))], False)
        assert result
    finally:
        ring.all_to_all_rows = document_ring.all_to_all_rows = original
    return {kind: (sum(each), len(each)) for kind, each in counts.items()}


def ring_of(case: Case, size: int, coordinate: int = 0) -> DocumentRing:
    """The ring that a rank makes of a case, whose rows are cut into shards."""
    _, ids = case.tensors()
    queries, keys, *places = (None if x is None else torch.cat(x.chunk(size, 1)) for x in ids)
    assert queries is not None and keys is not None
    runs = (PackedRuns.of(x, at, size, len(case.rows)) for x, at in zip((queries, keys), places, strict=True))
    left = None if case.window is None else case.window[0]
    return DocumentRing.of(size, coordinate, "", 1.0, (left, 0) if case.positions else (None, None), *runs)


@pytest.mark.parametrize(
    ("rows", "rounds"),
    [
        (((8, 8, 8, 8), (8, 8, 8, 8)), 0),  # every document on one rank, as much work on each
        (((8, 8, 8, 8), (8, 6, 10, 8)), 1),  # one reaches from rank 1 to rank 2, which has more work than the mean
        (((32,), (8, 8, 8, 8)), 2),  # causal: every rank sees all before it, the first two of them at once
    ],
)
def test_keys_travel_to_ranks_that_see_them(ranks: RankPool, rows: tuple[tuple[int, ...], ...], rounds: int) -> None:
    answers, ring = ranks.run(sent, rows, world=4), ring_of(Case(rows=rows), 4)
    keys = sum(length for spans in ring.spans.values() for _, length in spans)
    queries = sum(run.length for runs in ring.loans.values() for run in runs)
    # key heads, keys and values: forward; backward, and gradients back
    assert sum(each["keys"][0] for each in answers) == keys * 2 * (8 + 8) * 3
    # heads: q, result and its log-sum-exp; result, gradient, q, the log-sum-exp, and the gradient of q
    assert sum(each["queries"][0] for each in answers) == queries * 4 * ((8 + 8 + 1) + (8 * 3 + 1 + 8))
    assert len(ring.rounds()) == rounds and {each["keys"][1] for each in answers} == {3 * rounds}
    assert {each["queries"][1] for each in answers} == {4 * bool(rounds)}


# -- who computes what


def tokens_of(runs: Sequence[Run]) -> list[tuple[Document, int]]:
    return [(run.document, run.first + at) for run in runs for at in range(run.length)]


@settings(max_examples=150, deadline=None)
@example([[1, 9]], 8, True, None, False)
@given(
    st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=9), min_size=1, max_size=2),
    st.sampled_from((2, 4, 8)), st.booleans(), st.none() | st.integers(0, 12), st.booleans(),
)  # fmt: skip
def test_work_is_even_and_no_key_is_missing(
    rows: list[list[int]], size: int, positions: bool, left: int | None, scattered: bool
) -> None:
    length = -(-max(map(sum, rows)) // size) * size
    padded = tuple((*row, *(length - sum(row) for _ in range(sum(row) < length))) for row in rows)
    window = None if left is None or not positions else (left, 0)
    case = Case(rows=padded, positions=positions, window=window, scattered=scattered)
    ring = ring_of(case, size)
    keys = [tokens_of(runs) for runs in ring.keys.ranks]
    work = []
    for rank, runs in enumerate(ring.queries):
        seen: set[tuple[int, int]] = set()
        work.append(0)
        for document, position in tokens_of(runs):
            for owner, held in enumerate(keys):
                for row, (other, place) in enumerate(held):
                    near = not positions or 0 <= position - place <= (length if window is None else window[0])
                    if document == other and near:
                        work[-1] += 1
                        seen.add((owner, row))
        given = {(owner, row) for (to, owner), spans in ring.spans.items() if to == rank
                 for first, count in spans for row in range(first, first + count)}  # fmt: skip
        assert {each for each in seen if each[0] != rank} <= given
        if window is None and not scattered:
            assert {each for each in seen if each[0] != rank} == given
    computed = sorted(token for runs in ring.queries for token in tokens_of(runs))
    assert computed == sorted(token for held in keys for token in held), "each query is computed once"
    heaviest = max(max(row) for row in padded)
    assert max(work) <= sum(work) / size + heaviest


def test_a_long_document_lends_a_sixth() -> None:
    """What the plan prices: 0.153 of the queries, and attention of 32 ranks that is even up to a row of queries."""
    ring = ring_of(Case(rows=((32 * 256,),), heads=(1, 1)), 32)
    lent = sum(run.length for runs in ring.loans.values() for run in runs) / (32 * 256)
    assert lent == pytest.approx(0.153, abs=0.005) and lent <= 1 / LENT
