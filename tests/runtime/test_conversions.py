"""Every conversion on real ranks, forward and backward, against what placements mean on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool

from autopar.runtime import collectives as C
from autopar.runtime.comm.conversions import AxisOperation, apply_locally, parse_conversion
from autopar.runtime.device.mesh import MeshHandle

SHAPE = (8, 12, 8)
CONVERSIONS = [
    "S(0) -> R", "S(1) -> R", "S(-1) -> R", "S(1,3) -> R", "S(0) -> I", "S(2,2) -> I", "S(0) -> S(1)", "S(1,3) -> S(0)",
    "S(0,2) -> S(1,3)", "S(1) -> S(1,3)", "P -> R", "P -> I", "P -> S(0)", "P -> S(1,3)", "I -> R", "I -> S(1)", "I -> S(1,3)",
    "R -> S(2)", "R -> S(0,2)", "R -> I", "I -> P", "R -> P", "S(1) -> P", "S(0,2) -> P", "R -> R",
]  # fmt: skip


def pieces(placement: str, whole: torch.Tensor, world: int, seed: int, gradient: bool = False) -> list[torch.Tensor]:
    """What the ranks hold of `whole`. With `gradient`, of the gradient of a value in that placement."""
    if placement[0] == "S":
        dim, _, parts = placement[2:-1].partition(",")
        blocks = [block.chunk(world, int(dim)) for block in whole.chunk(int(parts or 1), int(dim))]
        return [torch.cat([block[rank] for block in blocks], int(dim)) for rank in range(world)]
    summed = (placement[0] == "P") != (gradient and placement in ("P", "R"))
    if not summed:
        return [whole] * world
    generator = torch.Generator().manual_seed(seed)
    parts_ = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(world - 1)]
    return [*parts_, whole - sum(parts_)]


def combine(placement: str, held: list[torch.Tensor], gradient: bool = False) -> torch.Tensor:
    """The inverse of `pieces`; equal copies must be equal."""
    if placement[0] == "S":
        dim, _, parts = placement[2:-1].partition(",")
        blocks = [local.chunk(int(parts or 1), int(dim)) for local in held]
        return torch.cat([block[i] for i in range(int(parts or 1)) for block in blocks], int(dim))
    if (placement[0] == "P") != (gradient and placement in ("P", "R")):
        return torch.stack(held).sum(0)
    for local in held[1:]:
        torch.testing.assert_close(local, held[0])
    return held[0]


def on_rank(axes: dict[str, int], axis: str, cases: list[tuple[str, list[Any], list[Any]]], how: str) -> list[Any]:
    """Converts this rank's piece of each case and sends this rank's piece of the gradient back."""
    handle = MeshHandle(axes).axis(axis)
    results = []
    if how == "compiled":
        torch._dynamo.reset()
        pieces_of_all = [inputs[handle.coordinate].clone().requires_grad_() for _, inputs, _ in cases]
        seeds = [gradients[handle.coordinate] for _, _, gradients in cases]

        def convert_all(xs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [C.convert(x, handle, text) for x, (text, _, _) in zip(xs, cases, strict=True)]

        found = torch.compile(convert_all, backend="aot_eager", fullgraph=True)(pieces_of_all)
        assert [y.shape for y in found] == [seed.shape for seed in seeds]
        return [(y.detach(), grad) for y, grad in zip(found, torch.autograd.grad(found, pieces_of_all, seeds), strict=True)]
    for text, inputs, gradients in cases:
        x = inputs[handle.coordinate].clone().requires_grad_()
        if how == "start":
            y = C.wait(C.start(x * 1, handle, text)) * 1
        elif how == "many":
            y, z, v = C.convert_many((x, 2 * x, 3 * x), handle, text)
            y = (y + z + v) / 6
        else:
            y = C.convert(x, handle, text)
        assert y.shape == gradients[handle.coordinate].shape, text
        (gradient,) = torch.autograd.grad(y, x, gradients[handle.coordinate])
        results.append((y.detach(), gradient))
    return results


def exercise(ranks: RankPool, how: str, texts: list[str], axes: dict[str, int] | None = None, axis: str = "tp") -> None:
    axes = axes or {"tp": 4}
    size, world = axes[axis], torch.tensor(list(axes.values())).prod().item()
    shape = tuple(extent * 2 for extent in SHAPE)
    torch.manual_seed(0)
    cases, wholes = [], []
    for text in texts:
        source, target = text.split(" -> ")
        whole, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
        wholes.append((whole, gradient))
        cases.append((text, pieces(source, whole, size, 1), pieces(target, gradient, size, 2, gradient=True)))
    answers = ranks.run(on_rank, axes, axis, cases, how, world=world)
    stride = 1 if axis == list(axes)[-1] else list(axes.values())[-1]
    column = [answers[index * stride] for index in range(size)]
    for index, (text, (whole, gradient)) in enumerate(zip(texts, wholes, strict=True)):
        source, target = text.split(" -> ")
        torch.testing.assert_close(combine(target, [a[index][0] for a in column]), whole, msg=lambda m, t=text: f"{t}: {m}")
        got = combine(source, [a[index][1] for a in column], gradient=True)
        torch.testing.assert_close(got, gradient, msg=lambda m, t=text: f"{t} backward: {m}")


@pytest.mark.parametrize("how", ["convert", "start", "many"])
def test_every_conversion(ranks: RankPool, how: str) -> None:
    exercise(ranks, how, CONVERSIONS)


def test_compiled_conversions_that_differ_by_rank(ranks: RankPool) -> None:
    """One way or the other: there is one graph for all ranks."""
    texts = [each for each in CONVERSIONS if any(operation.differs_by_rank for operation in parse_conversion(each))]
    exercise(ranks, "compiled", [*texts, "S(1) -> S(1,3)"])


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_on_each_axis_of_two(ranks: RankPool, axis: str) -> None:
    exercise(ranks, "convert", CONVERSIONS, {"dp": 2, "tp": 2}, axis)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_coordinate_that_is_a_tensor_gives_the_same_bits(dtype: torch.dtype) -> None:
    """As compiled code has it: of infinities and zeros with a sign too, of tensors with gaps, and of none."""
    whole = torch.randn(3, 8, 4, 8).mul(2).to(dtype)
    if dtype.is_floating_point:
        whole.view(-1)[:3] = torch.tensor([torch.inf, torch.nan, -0.0])
    for x in (whole, whole.transpose(1, 3), whole[:0], whole[..., ::2]):
        for kind in ("slice", "mask", "pad"):
            for dim, parts in ((1, 1), (1, 2), (-2, 1), (2, 2)):
                for coordinate in range(2):
                    operation = AxisOperation(kind, dim, parts)
                    one, other = (apply_locally(operation, x, 2, place) for place in (coordinate, torch.tensor(coordinate)))
                    assert one.dtype == other.dtype and one.shape == other.shape and not _share(x, other)
                    bits = [each.contiguous().view(torch.uint8) for each in (one, other)] if x.numel() else (one, other)
                    assert torch.equal(*bits), operation


def _share(x: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(x.numel()) and x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def compiled(axes: dict[str, int], backend: str) -> float:
    """The largest difference between a chain of conversions compiled whole and eager, forward and backward."""
    tp = MeshHandle(axes).tp

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x = C.convert(x, tp, "S(1) -> R")
        pending = C.start(w, tp, "S(0) -> R")
        x = C.convert(x.sin(), tp, "R -> S(0,2)")
        x = C.convert(x, tp, "S(0,2) -> S(1)")
        y = C.convert(x, tp, "S(1) -> P") * 2
        y = C.convert(y, tp, "P -> S(1)") @ C.convert(C.wait(pending), tp, "R -> S(0)")
        a, b = C.convert_many((C.convert(y, tp, "P -> I"), w), tp, ("I -> R", "R -> I"))
        return C.convert((a.sum() + b.sum()) * (tp.coordinate + 1), tp, "P -> I")

    results = []
    for function in (chain, torch.compile(chain, backend=backend, fullgraph=True)):
        generator = torch.Generator().manual_seed(tp.coordinate)
        x = torch.randn(8, tp.size, dtype=torch.float64, generator=generator).requires_grad_()
        w = torch.randn(tp.size, 3, dtype=torch.float64, generator=generator).requires_grad_()
        loss = function(x, w)
        loss.backward()
        results.append((loss.detach(), x.grad, w.grad))
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("backend", "size"), [("aot_eager", 2), pytest.param("inductor", 2, marks=pytest.mark.slow)])
def test_compiles_without_graph_breaks(ranks: RankPool, backend: str, size: int) -> None:
    assert max(ranks.run(compiled, {"tp": size}, backend, world=size, timeout=240)) < 1e-12


def integers(axes: dict[str, int]) -> list[torch.Tensor]:
    tp = MeshHandle(axes).tp
    count = torch.tensor(10 + tp.coordinate)
    ids = torch.arange(8).view(2, 4)
    mask = torch.arange(4) == tp.coordinate
    return [
        C.convert(count, tp, "P -> R"),
        C.convert(count, tp, "P(max) -> R"),
        C.convert(count, tp, "P(min) -> R"),
        C.convert(ids, tp, "R -> S(1)"),
        C.convert(mask[tp.coordinate : tp.coordinate + 1], tp, "S(0) -> R"),
        C.convert(count.double(), tp, "P(max) -> R"),
        C.convert(torch.full((2,), float(tp.coordinate), dtype=torch.bfloat16), tp, "P -> R"),
    ]


def test_without_gradients(ranks: RankPool) -> None:
    for rank, (total, top, low, part, mask, high, half) in enumerate(ranks.run(integers, {"tp": 4})):
        assert (int(total), int(top), int(low), float(high)) == (46, 13, 10, 13.0)
        assert part.tolist() == [[rank], [4 + rank]]
        assert mask.tolist() == [True] * 4 and half.tolist() == [6.0, 6.0]


def without_elements(axes: dict[str, int], how: str) -> list[torch.Size]:
    tp, out = MeshHandle(axes).tp, []
    for text in ("S(0) -> R", "S(1) -> R", "S(-1) -> I", "P -> S(1)", "P -> S(2)"):
        for shape in ((0, 4, 4), (3, 0, 4), (3, 4, 0)):
            x = torch.ones(shape, requires_grad=True)
            y = C.convert(x, tp, text) if how == "convert" else C.wait(C.start(x, tp, text))
            (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
            assert gradient.shape == shape, text
            out.append(y.shape)
    return out


@pytest.mark.parametrize("how", ["convert", "start"])
def test_tensors_without_elements(ranks: RankPool, how: str) -> None:
    """A shard of no rows, of whatever other dimensions."""
    shapes = ranks.run(without_elements, {"tp": 2}, how, world=2)[0]
    assert shapes == [
        (0, 4, 4), (6, 0, 4), (6, 4, 0), (0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 4, 8), (3, 0, 8), (3, 4, 0),
        (0, 2, 4), (3, 0, 4), (3, 2, 0), (0, 4, 2), (3, 0, 2), (3, 4, 0),
    ]  # fmt: skip


def mixed_bucket(axes: dict[str, int]) -> Any:
    tp = MeshHandle(axes).tp
    a, b = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    x, y = C.convert_many((a, b), tp, ("S(0) -> R", "P -> I"))
    (x.sum() * (tp.coordinate + 1) + y.sum()).backward()
    return x.detach(), y.detach(), a.grad, b.grad


def gathered_together(axes: dict[str, int]) -> list[tuple[int, ...]]:
    tp = MeshHandle(axes).tp
    both = C.convert_many((torch.ones(1, 8), torch.ones(1), torch.ones(2, 3)), tp, ("S(0) -> I", "S(0) -> I", "S(0) -> R"))
    return [each.stride() for each in both]


def test_parts_of_a_bucket_have_no_gaps(ranks: RankPool) -> None:
    """The backward of batch norm on CPUs reads a weight with gaps wrongly (torch 2.13)."""
    assert ranks.run(gathered_together, {"tp": 2}, world=2)[0] == [(8, 1), (1,), (3, 1)]


def test_a_bucket_of_unlike_conversions(ranks: RankPool) -> None:
    for x, y, a, b in ranks.run(mixed_bucket, {"tp": 4}):
        assert x.shape == (8, 3) and y.eq(4).all() and a.eq(10).all() and b.eq(1).all()


def overlap(axes: dict[str, int]) -> list[str]:
    """The order in which collectives and products run when a conversion is started early and awaited late."""
    tp = MeshHandle(axes).tp
    x, w = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        pending = C.start(x * 1, tp, "S(0) -> R")
        y = w @ w
        z = C.wait(pending)
        (z.sum() + y.sum()).backward()
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")
    names = {"aten::mm", *(f"_c10d_functional::{kind}" for kind in kinds)}
    events = sorted((e for e in profile.events() if e.name in names), key=lambda e: e.time_range.start)
    return [event.name.split("::")[1] for event in events]


def test_start_and_wait_leave_room_between(ranks: RankPool) -> None:
    forward = ["all_gather_into_tensor", "mm", "wait_tensor"]
    assert ranks.run(overlap, {"tp": 4})[0] == [*forward, "reduce_scatter_tensor", "mm", "mm", "wait_tensor"]


@pytest.mark.parametrize("text", ["S(0)", "S(0) -> Q", "P -> P(max)", "R -> P(max)", "I -> X(1)"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="conversion|placement"):
        parse_conversion(text)
