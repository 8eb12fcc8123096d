"""The conversion table and the nesting rule, proven by execution on simulated ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from support.oracles.simulate_blocks import apply_collective, convert_on_ranks
from support.oracles.simulate_ranks import assemble, close, dual, shard, shard_axis, unshard_axis
from support.plans.conversion_graph import single_axis_conversions

from autopar.ir.graph import Value
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard, can_shard, format_placements, local_parts
from autopar.rules.conversions import axis_conversion, changed_axis, may_convert, placement_states

PLACES: list[Placement] = [Shard(0), Shard(1), Shard(0, 2), Shard(0, 4), Replicate(), Invariant(), Partial()]


def parts(placement: Placement) -> int:
    return placement.parts if isinstance(placement, Shard) else 1


@pytest.mark.parametrize(("source", "target"), [pair for pair in product(PLACES, PLACES) if pair[0] != pair[1]], ids=str)
def test_forward_and_backward_are_exact(source: Placement, target: Placement) -> None:
    torch.manual_seed(0)
    x, grad, size = torch.randn(16, 8, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64), 2
    how = axis_conversion(source, target, True)
    assert how is not None, "every pair has a direct conversion"
    moved = apply_collective(
        how.forward, shard_axis(x, source, parts(source), size), source, target, (parts(source), parts(target))
    )
    close(unshard_axis(moved, target, parts(target)), x, 1e-12)
    (after,), (before,) = dual((target,)), dual((source,))
    back = apply_collective(
        how.backward, shard_axis(grad, after, parts(after), size), after, before, (parts(after), parts(before))
    )
    close(unshard_axis(back, before, parts(before)), grad, 1e-12)


def test_invariant_needs_a_gradient() -> None:
    assert axis_conversion(Replicate(), Invariant(), False) is None
    assert axis_conversion(Invariant(), Shard(0), False) is None
    assert axis_conversion(Shard(0), Replicate(), False).backward is None  # type: ignore[union-attr]
    assert axis_conversion(Replicate(), Replicate(), True) is None


def test_a_maximum_is_only_reduced() -> None:
    assert axis_conversion(Partial("max"), Replicate(), False).forward == "all_reduce"  # type: ignore[union-attr]
    assert axis_conversion(Partial("max"), Shard(0), False) is None
    assert axis_conversion(Replicate(), Partial("max"), False) is None


AXES = [Shard(0), Shard(0, 2), Shard(0, 4), Shard(1), Replicate(), Partial()]
SIZES, SHAPE = (2, 2), (16, 8)


def test_every_legal_conversion_on_two_axes_is_exact() -> None:
    torch.manual_seed(0)
    x = torch.randn(SHAPE, dtype=torch.float64)
    value = Value("x", SHAPE, "float64", True)
    among = [state for state in product(AXES, AXES) if can_shard(SHAPE, state, SIZES)]
    legal = list(single_axis_conversions(SHAPE, among, SIZES, True))
    assert len(legal) > 100
    for source, target in legal:
        moved = convert_on_ranks(shard(x, source, SIZES), value, source, target, SIZES)
        try:
            close(assemble(moved, target, SIZES), x, 1e-12)
        except AssertionError as error:
            raise AssertionError(f"{format_placements(source)} -> {format_placements(target)}") from error


def test_the_refused_conversions_are_inexact() -> None:
    x, value = torch.arange(128.0).reshape(SHAPE), Value("x", SHAPE, "float32", True)
    among = [state for state in product(AXES, AXES) if can_shard(SHAPE, state, SIZES)]
    pairs = [(a, b) for a, b in product(among, among) if sum(i != j for i, j in zip(a, b, strict=True)) == 1]
    refused = [(a, b) for a, b in pairs if not may_convert(a, b[axis := changed_axis(a, b)], axis)]
    assert refused
    for source, target in refused:
        assert changed_axis(source, target) == 0 and isinstance(source[1], Shard)
        moved = assemble(convert_on_ranks(shard(x, source, SIZES), value, source, target, SIZES), target, SIZES)
        assert not torch.equal(moved, x), f"{format_placements(source)} -> {format_placements(target)}"


def test_states_are_the_product_of_what_divides() -> None:
    ends = [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Invariant(), Replicate())]
    assert set(placement_states((4, 3), ends, (2, 4), False)) == {
        (Replicate(), Replicate()),
        (Replicate(), Shard(0)),
        (Shard(0), Replicate()),
    }
    assert local_parts((Shard(0), Shard(0, 4)), (2, 2), 1) == 2
