"""Attention of a cut sequence on real ranks, against the single process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.rank_pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from autopar.ir.graph import Node, Ref, Value
from autopar.operations.attention import ring_collectives
from autopar.runtime import collectives as C
from autopar.runtime.device.mesh import MeshHandle
from autopar.runtime.ops.attention.merge import AttentionTile
from autopar.runtime.ops.attention.sharded import attention_masked, band_of, scale_of
from autopar.runtime.step.recompute import Recompute


@dataclass(frozen=True)
class Case:
    """One attention. `mask`: "" none, "bool" and "added" with rows, "padding" without."""

    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (16, 16)
    causal: bool = False
    window: tuple[int, int] | None = None
    mask: str = ""
    value: int = 8
    dtype: torch.dtype = torch.float64
    again: str = ""

    def tensors(self) -> list[Tensor | None]:
        """q, k, v, what the result is multiplied by, and the mask."""
        torch.manual_seed(0)
        (h, g), (s, t) = self.heads, self.lengths
        shapes = ((2, h, s, 8), (2, g, t, 8), (2, g, t, self.value), (2, h, s, self.value))
        made: list[Tensor | None] = [torch.randn(shape, dtype=torch.float64).to(self.dtype) for shape in shapes]
        mask: Tensor | None = None
        if self.mask == "bool":
            mask = torch.rand(2, 1, s, t) < 0.5
            mask[0, 0, 3] = False  # a query without keys
            mask[..., : t // 2] &= torch.arange(s).view(s, 1) % 2 == 0  # some without keys on some ranks
        elif self.mask == "added":
            mask = torch.randn(1, h, s, t, dtype=torch.float64).to(self.dtype)
        elif self.mask == "added to columns":
            mask = torch.randn(2, h, 1, t, dtype=torch.float64).to(self.dtype)
        elif self.mask == "padding":
            mask = (torch.arange(t) < torch.tensor([[t], [t // 2 + 1]])).view(2, 1, 1, t)
        return [*made, mask]

    def dense(self, mask: Tensor | None) -> Tensor | None:
        """The mask that stands for all of it."""
        if not self.causal and self.window is None:
            return mask
        (s, t), (left, right) = self.lengths, self.window or (-1, -1)
        distance = torch.arange(t) - torch.arange(s).view(s, 1)
        allowed = torch.ones(s, t, dtype=torch.bool)
        if self.causal:
            allowed &= distance <= 0
        if left >= 0:
            allowed &= distance >= -left
        if right >= 0:
            allowed &= distance <= right
        if mask is None or mask.dtype is torch.bool:
            return allowed if mask is None else allowed & mask
        return mask.masked_fill(~allowed, float("-inf"))


def outcome(function: Any, operands: list[Tensor], mask: Tensor | None, weight: Tensor, again: str) -> list[Tensor]:
    """The result and the gradients of q, k and v, and of a mask of numbers."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in (*operands, *([] if mask is None else [mask]))]
    if again == "checkpoint":
        out = checkpoint(function, *leaves, use_reentrant=False)
    elif again:
        with Recompute(MeshHandle({"tp": torch.distributed.get_world_size()}).host_memory) as run:
            middle = run(torch.mul, leaves[0], 1.0)
            out = run(torch.mul, run(function, middle, *leaves[1:]), 1.0)
    else:
        out = function(*leaves)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def on_rank(name: str, cases: list[dict[str, Any]], world: int) -> list[list[Tensor]]:
    """What this rank makes of its part of each case."""
    axis = MeshHandle({"tp": world}).tp

    def part(x: Tensor, dim: int) -> Tensor:
        return x.chunk(axis.size, dim)[axis.coordinate] if x.shape[dim] > 1 else x

    found = []
    for case in (Case(**each) for each in cases):
        q, k, v, weight, mask = case.tensors()
        assert q is not None and k is not None and v is not None and weight is not None
        dim = 1 if name == "attention_heads" else 2
        q, weight = part(q, dim), part(weight, dim)
        if name == "attention_ring":
            k, v = part(k, 2), part(v, 2)
        mask = None if mask is None else part(mask, dim)

        def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, case: Case = case) -> Any:
            return getattr(C, name)(q, k, v, mask, 0.0, case.causal, window=case.window, axis=axis)

        found.append(outcome(run, [q, k, v], mask, weight, case.again))
    return found


def expected(case: Case) -> list[Tensor]:
    """One process, float64."""
    q, k, v, weight, mask = (None if x is None or x.dtype is torch.bool else x.double() for x in case.tensors())
    mask = case.tensors()[4] if case.mask in ("bool", "padding") else mask
    assert q is not None and k is not None and v is not None and weight is not None

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, case.dense(mask), enable_gqa=True)

    return outcome(run, [q, k, v], mask, weight, "")


CASES = {
    "full": Case(),
    "causal": Case(causal=True),
    "longer keys": Case(lengths=(16, 24)),
    "shorter keys": Case(lengths=(24, 8)),
    "causal, longer keys": Case(lengths=(16, 24), causal=True),
    "narrow window": Case(lengths=(32, 32), window=(2, 0)),
    "window over parts": Case(lengths=(32, 32), window=(9, 0)),
    "window beside causal": Case(lengths=(32, 32), causal=True, window=(20, 20)),
    "window over nearly all": Case(lengths=(32, 32), causal=True, window=(29, -1)),
    "both sides": Case(lengths=(32, 32), window=(5, 6)),
    "both sides, wide": Case(lengths=(32, 32), window=(19, 11)),
    "bool mask": Case(mask="bool"),
    "bool mask under a window": Case(mask="bool", window=(5, 5)),
    "added mask": Case(mask="added"),
    "added mask, causal": Case(mask="added", causal=True),
    "added mask under a window": Case(mask="added", window=(5, 2)),
    "added to columns, causal": Case(mask="added to columns", causal=True),
    "padding": Case(mask="padding"),
    "padding, causal": Case(mask="padding", causal=True),
    "padding under a window": Case(mask="padding", causal=True, window=(5, -1)),
    "grouped": Case(heads=(4, 2), causal=True),
    "one key head": Case(heads=(4, 1), causal=True),
    "other values": Case(heads=(4, 2), causal=True, value=4),
    "checkpoint": Case(causal=True, again="checkpoint"),
    "again": Case(causal=True, again="again"),
    "grouped, padding": Case(heads=(4, 2), mask="padding"),
}


def compare(ranks: RankPool, name: str, cases: dict[str, Case], world: int, tolerance: float = 1e-12) -> None:
    answers = ranks.run(on_rank, name, [asdict(case) for case in cases.values()], world, world=world)
    for index, (title, case) in enumerate(cases.items()):
        right = expected(case)
        out, *grads = (torch.stack([answer[index][which] for answer in answers]) for which in range(len(right)))
        dim = 1 if name == "attention_heads" else 2
        whole = [torch.cat(tuple(x), dim) for x in (out, grads[0])]
        whole += [torch.cat(tuple(x), 2) if name == "attention_ring" else x.sum(0) for x in grads[1:3]]
        whole += [torch.cat(tuple(x), 2) if case.mask == "added" else x.sum(0) for x in grads[3:]]
        for what, found, wanted in zip(("result", "q", "k", "v", "mask"), whole, right, strict=False):
            error = float((found.double() - wanted).abs().max())
            assert found.shape == wanted.shape and error <= tolerance, f"{title}, {what}: {error}"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["attention_ring", "attention_rows"])
def test_equals_one_process(ranks: RankPool, name: str, world: int) -> None:
    compare(ranks, name, CASES, world)


def compiled(causal: bool, window: tuple[int, int] | None) -> list[float]:
    """How far a compiled program is from the same as it is."""
    axis = MeshHandle({"tp": 2}).tp
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64).requires_grad_()

    def both(x: Tensor) -> Tensor:
        ring = C.attention_ring(x * 2, x[:, ::2] + 1, x[:, ::2], None, 0.0, causal, window=window, axis=axis)
        return ring * 3 + C.attention_rows(
            x, torch.cat((x, x), 2), torch.cat((x, x), 2), None, 0.0, causal, window=window, axis=axis
        )

    found = []
    for function in (both, torch.compile(both, backend="aot_eager", fullgraph=True)):
        out = function(x)
        found.append((out, *torch.autograd.grad(out.sum(), x)))
    return [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]


def test_traces_without_a_break(ranks: RankPool) -> None:
    assert ranks.run(compiled, True, (6, -1), world=2, timeout=120) == [[0.0, 0.0]] * 2


def sent(causal: bool, window: tuple[int, int] | None) -> list[int]:
    """Elements that this rank sends in a forward and in its backward."""
    from autopar.runtime.ops.attention import ring as attention_ring

    axis = MeshHandle({"tp": 4}).tp
    counts: list[int] = []
    original = attention_ring.all_to_all_rows

    def counted(rows: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        counts.append(sum(send))
        return original(rows, receive, send, group)

    q, k, v = (torch.randn(2, heads, 8, 8, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    attention_ring.all_to_all_rows = counted
    try:
        out = C.attention_ring(q, k, v, None, 0.0, causal, window=window, axis=axis)
        forward = sum(counts)
        out.sum().backward()
    finally:
        attention_ring.all_to_all_rows = original
    return [forward, sum(counts) - forward]


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_what_travels_is_what_the_rule_says(ranks: RankPool, kind: str) -> None:
    """Of n ranks each gets n - 1 parts of a gather, gives as many to a scatter; half of what is mirrored moves. A window that
    reaches one part takes one from the rank before."""
    causal, window = kind != "full", (5, -1) if kind == "window" else None
    found = [sum(side) for side in zip(*ranks.run(sent, causal, window, world=4), strict=True)]
    shapes = ((2, 4, 32, 8), (2, 2, 32, 8), (2, 2, 32, 8))
    values = tuple(Value(name, shape, "float64", True) for name, shape in zip("qkvy", (*shapes, shapes[0]), strict=True))
    named: tuple[tuple[str, Any], ...] = (("enable_gqa", True), *((("window", (3, -1)),) if window else ()))
    node = Node("ap.attention", (*map(Ref, "qkv"), None, 0.0, causal), named, values[3:])
    told = [0.0, 0.0]
    for each in ring_collectives(node, shapes):
        moved = {"all_gather": 3, "reduce_scatter": 3, "all_to_all": 1}[each.kind]
        told[each.backward] += torch.Size(each.shape).numel() * (3 / 4 if each.group == 2 else moved)  # type: ignore[arg-type]
    assert found == told


@pytest.mark.parametrize("name", ["bool mask under a window", "added mask, causal", "padding under a window"])
def test_all_scores_at_once(name: str) -> None:
    """What runs on CUDA under a mask."""
    case = CASES[name]
    q, k, v, _, mask = case.tensors()
    assert q is not None and k is not None and v is not None and mask is not None
    block = AttentionTile(((0, q.shape[2]),), ((0, k.shape[2]),), band_of(case.causal, case.window), scale_of(q, None), mask)
    torch.testing.assert_close(attention_masked(block, q, k, v), C.attention(q, k, v, mask, 0.0, case.causal, window=case.window))


def test_eight_ranks(ranks: RankPool) -> None:
    chosen = ("full", "causal", "window over parts", "window beside causal", "both sides", "bool mask", "padding, causal")
    compare(ranks, "attention_ring", {name: CASES[name] for name in chosen}, 8)


def test_fewer_key_heads_than_ranks(ranks: RankPool) -> None:
    cases = {
        f"{heads} {case}": replace(CASES[case], heads=heads)
        for heads in ((4, 2), (8, 2), (12, 6), (12, 3), (4, 1))
        for case in ("full", "causal", "narrow window", "padding")
    }
    compare(ranks, "attention_heads", cases, 4)


@pytest.mark.parametrize("name", ["attention_ring", "attention_rows"])
def test_half_precision_is_added_up_in_float32(ranks: RankPool, name: str) -> None:
    """Nothing but what comes in and goes out is rounded to 8 bits: as near to the exact result as the single process is."""
    chosen = ("full", "causal", "window over parts", "padding, causal", "grouped")
    cases = {title: replace(CASES[title], dtype=torch.bfloat16, lengths=(64, 64)) for title in chosen}
    compare(ranks, name, cases, 4, 0.06)
