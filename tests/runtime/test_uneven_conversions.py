"""Every conversion on an axis with uneven shares of the batch, forward and backward, against what placements mean on one process;
and the shares themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor

from autopar.runtime import collectives as C
from autopar.runtime.device.axis import AxisHandle, shares_of
from autopar.runtime.device.mesh import MeshHandle

BATCH = 7
SHAPE = (14, 42, 28)
"""Of whole examples in every dimension, and in two and three parts of it."""
CONVERSIONS = [
    "S(0) -> R", "S(-1) -> R", "S(1,3) -> R", "S(0) -> I", "S(2,2) -> I", "S(0) -> S(1)", "S(0,2) -> S(1,3)", "S(1) -> S(1,3)",
    "P -> R", "P -> I", "P -> S(0)", "P -> S(1,3)", "I -> R", "I -> S(1)", "I -> S(1,3)", "R -> S(2)", "R -> S(0,2)", "R -> I",
    "I -> P", "R -> P", "S(1) -> P", "S(0,2) -> P", "R -> R",
]  # fmt: skip


def piece(placement: str, whole: Tensor, shares: tuple[int, ...], rank: int, gradient: bool = False) -> Tensor:
    """What a rank holds of `whole`; with `gradient`, of the gradient of a value in that placement."""
    if placement[0] == "S":
        dim, _, parts = placement[2:-1].partition(",")
        return torch.cat([
            part.split([part.shape[int(dim)] // sum(shares) * share for share in shares], int(dim))[rank]
            for part in whole.chunk(int(parts or 1), int(dim))
        ], int(dim))  # fmt: skip
    if placement != ("R" if gradient else "P"):
        return whole
    weights = [1.5, -2.0, 0.25][: len(shares) - 1]  # summands that differ between ranks
    return whole * [*weights, 1 - sum(weights)][rank]


def on_rank(axes: dict[str, int], how: str) -> None:
    mesh = MeshHandle(axes).for_variant(False, BATCH)
    axis = mesh.dp
    assert (mesh.own_examples, mesh.all_examples) == (axis.shares[axis.coordinate], BATCH) and mesh.axis("dp") is axis
    for text in CONVERSIONS:
        source, target = text.split(" -> ")
        generator = torch.Generator().manual_seed(1)
        whole, gradient = torch.randn(2, *SHAPE, dtype=torch.float64, generator=generator)
        x = piece(source, whole, axis.shares, axis.coordinate).clone().requires_grad_()
        y = convert(how, x * 1, axis, text)
        expected = piece(target, whole, axis.shares, axis.coordinate)
        given = piece(target, gradient, axis.shares, axis.coordinate, gradient=True)
        (found,) = torch.autograd.grad(y, x, given)
        wanted = piece(source, gradient, axis.shares, axis.coordinate, gradient=True)
        for each, right, partial in ((y.detach(), expected, target == "P"), (found, wanted, source == "R")):
            if partial:  # only the sum is determined
                each, right = (C.convert(tensor, axis, "P -> I") for tensor in (each, right))
            torch.testing.assert_close(each, right, msg=lambda said, text=text: f"{text}: {said}")


def convert(how: str, x: Tensor, axis: AxisHandle, text: str) -> Any:
    if how == "start":
        return C.wait(C.start(x, axis, text)) * 1
    return C.convert_many((x, 2 * x), axis, text)[0] if how == "many" else C.convert(x, axis, text)


@pytest.mark.parametrize("how", ["at once", "start", "many"])
@pytest.mark.parametrize("axes", [{"dp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_conversions(axes: dict[str, int], how: str, ranks: RankPool) -> None:
    ranks.run(on_rank, axes, how)


def test_shares() -> None:
    """They are the batch, and differ by one example; parts of a dimension are in their order."""
    for batch in range(1, 30):
        for ranks in range(1, 6):
            shares = shares_of(batch, ranks)
            assert sum(shares) == batch and max(shares) - min(shares) <= 1 and list(shares) == sorted(shares, reverse=True)
    axis = AxisHandle("dp", 2, 1, "", (4, 3))
    assert axis.part(torch.arange(14), 0).tolist() == list(range(8, 14)) and axis.divides(21) and not axis.divides(8)
    assert replace(axis, shares=()).part(torch.arange(14), 0).tolist() == list(range(7, 14))
