"""The conversion table and the nesting rule, proven by execution on simulated ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.simulate import assemble, close, cut, dual, paste, shard
from support.whole import convert, move

from autopar.ir.graph import Value
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard, can_shard, format_placements, local_parts
from autopar.rules.conversions import arcs, changed_axis, conversion, nests, states

PLACES: list[Placement] = [Shard(0), Shard(1), Shard(0, 2), Shard(0, 4), Replicate(), Invariant(), Partial()]


def parts(placement: Placement) -> int:
    return placement.parts if isinstance(placement, Shard) else 1


@pytest.mark.parametrize(("source", "target"), [pair for pair in product(PLACES, PLACES) if pair[0] != pair[1]], ids=str)
def test_forward_and_backward_are_exact(source: Placement, target: Placement) -> None:
    torch.manual_seed(0)
    x, grad, size = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64), 2
    how = conversion(source, target, True)
    assert how is not None, "every pair has a direct conversion"
    moved = move(how.forward, cut(x, source, parts(source), size), source, target, (parts(source), parts(target)))
    close(paste(moved, target, parts(target)), x, 1e-12)
    (after,), (before,) = dual((target,)), dual((source,))
    back = move(how.backward, cut(grad, after, parts(after), size), after, before, (parts(after), parts(before)))
    close(paste(back, before, parts(before)), grad, 1e-12)


def test_invariant_needs_a_gradient() -> None:
    assert conversion(Replicate(), Invariant(), False) is None
    assert conversion(Invariant(), Shard(0), False) is None
    assert conversion(Shard(0), Replicate(), False).backward is None  # type: ignore[union-attr]
    assert conversion(Replicate(), Replicate(), True) is None


def test_a_maximum_is_only_reduced() -> None:
    assert conversion(Partial("max"), Replicate(), False).forward == "all_reduce"  # type: ignore[union-attr]
    assert conversion(Partial("max"), Shard(0), False) is None
    assert conversion(Replicate(), Partial("max"), False) is None


AXES = [Shard(0), Shard(0, 2), Shard(0, 4), Shard(1), Replicate(), Partial()]
SIZES, SHAPE = (2, 2), (16, 8)


def test_every_legal_arc_on_two_axes_is_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    value = Value("x", SHAPE, "float64", True)
    among = [state for state in product(AXES, AXES) if can_shard(SHAPE, state, SIZES)]
    legal = list(arcs(SHAPE, among, SIZES, True))
    assert len(legal) > 100
    for source, target in legal:
        moved = convert(shard(x, source, SIZES), value, source, target, SIZES)
        try:
            close(assemble(moved, target, SIZES), x, 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{format_placements(source)} -> {format_placements(target)}") from error


def test_the_refused_arcs_are_inexact() -> None:
    x, value = torch.arange(128.0).reshape(SHAPE), Value("x", SHAPE, "float32", True)
    among = [state for state in product(AXES, AXES) if can_shard(SHAPE, state, SIZES)]
    refused = [
        (a, b) for a, b in product(among, among) if sum(i != j for i, j in zip(a, b, strict=True)) == 1 and not nests(a, b)
    ]
    assert refused
    for source, target in refused:
        assert changed_axis(source, target) == 0 and isinstance(source[1], Shard)
        moved = assemble(convert(shard(x, source, SIZES), value, source, target, SIZES), target, SIZES)
        assert not torch.equal(moved, x), f"{format_placements(source)} -> {format_placements(target)}"


def test_states_are_the_product_of_what_divides() -> None:
    ends = [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Invariant(), Replicate())]
    assert set(states((4, 3), ends, (2, 4), False)) == {
        (Replicate(), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
    }
    assert local_parts((Shard(0), Shard(0, 4)), (2, 2), 1) == 2
