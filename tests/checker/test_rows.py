"""Every row of the checker's table, proven by execution: whatever kinds of operands it accepts on an axis, ranks that hold such
operands make such results, forward and gradients."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from support.models.operation_examples import build, constants, single_operations, t
from support.models.operations.further_examples import OPTIONAL, further_operations
from support.oracles.simulate_ranks import assert_sharded_equals_whole

from autopar.checker.blocks.local_arguments import LocalArguments
from autopar.checker.captured import CapturedBlock, CapturedOperation, canonical
from autopar.checker.reader import PlacedTensor, Reader
from autopar.checker.rows import table
from autopar.checker.rows.carry import NotCarried, carry
from autopar.checker.rows.operation_call import bind
from autopar.checker.shards import Axes, Cut, Kind, NotProven
from autopar.ir.graph import Block
from autopar.ir.placement import Invariant, Partial, Placement, Replicate, Shard
from autopar.rules.localize import localize_args

CASES = [*single_operations(), *further_operations()]
MOST = 300
"""Assignments of kinds that are tried of each case."""
NO_VALUES = ("aten.empty", "aten.new_empty")


def kinds_of(shape: Sequence[int], floating: bool, size: int) -> list[Kind]:
    cuts: list[Kind] = [
        Cut(dim, extent // (size * parts))
        for dim, extent in enumerate(shape)
        for parts in (1, 2, 3)
        if extent and extent % (size * parts) == 0
    ]
    return ["R", *(["I", "P"] if floating else []), *cuts]


def placement_of(kind: Kind, shape: Sequence[int], size: int) -> Placement:
    if isinstance(kind, Cut):
        return Shard(kind.dim, shape[kind.dim] // (size * kind.inner))
    return {"R": Replicate(), "I": Invariant(), "P": Partial()}[kind]


def assignments(choices: Sequence[Sequence[Kind]], seed: int) -> Iterator[tuple[Kind, ...]]:
    if prod(map(len, choices)) <= MOST:
        yield from product(*choices)
        return
    random = Random(seed)
    for _ in range(MOST):
        yield tuple(random.choice(each) for each in choices)
    for kind in {kind for each in choices for kind in each}:  # alike where they can be
        yield tuple(kind if kind in each else "R" for each in choices)


def accepted(block: Block, size: int) -> Iterator[tuple[CapturedOperation, list[Kind], list[Kind]]]:
    """The kinds of operands and results on one axis that the checker takes for right."""
    captured = CapturedBlock(block, 8)
    if not captured.operations:
        return
    (operation,) = captured.operations
    row = table.row(operation.call)
    if row is None:
        return
    values = block.values()
    choices = [
        kinds_of(shape, values[name].differentiable, size)
        for name, shape in zip(operation.operands, operation.call.shapes, strict=True)
    ]
    axes = Axes(("tp",), (size,))
    flowing = any(value.differentiable for value in operation.node.outputs)
    flows = [flowing and values[name].differentiable for name in operation.operands]
    for kinds in assignments(choices, 0):
        try:
            found = carry(row, axes, [(kind,) for kind in kinds], flows, [None] * len(operation.results))
            check_arguments(operation, axes, [(kind,) for kind in kinds], found)
        except (NotCarried, ValueError):
            continue
        yield operation, list(kinds), [each[0] for each in found]


def check_arguments(operation: CapturedOperation, axes: Axes, kinds: Any, found: Any) -> None:
    """ValueError where the arguments of ranks cannot be their share of the model's."""
    shapes = [axes.local_shape(shape, each) for shape, each in zip(operation.call.results, found, strict=True)]
    if None in shapes:
        raise ValueError("no shards")
    node = localize_args(operation.node, shapes)  # type: ignore[arg-type]
    whole = CapturedBlock(Block("x", (), (), (node,), ()), 8)
    args = [whole.argument(arg) for arg in node.args]
    given = bind(node.op, args, {name: whole.argument(arg) for name, arg in node.kwargs})
    tensors = [
        PlacedTensor(name, shape, each, torch.empty(axes.local_shape(shape, each) or (), device="meta"))
        for name, shape, each in zip(operation.operands, operation.call.shapes, kinds, strict=True)
    ]
    LocalArguments(axes, operation.call, given, tensors, found).check(table.exempt(operation.call.op))


def check(block: Block, tensors: dict[str, torch.Tensor], size: int) -> int:
    done = 0
    for operation, kinds, results in accepted(block, size):
        if any(kind in ("Pmax", "Pmin") for kind in results):
            continue
        operands = [(placement_of(k, shape, size),) for k, shape in zip(kinds, operation.call.shapes, strict=True)]
        made = [(placement_of(k, shape, size),) for k, shape in zip(results, operation.call.results, strict=True)]
        try:
            assert_sharded_equals_whole(operation.node, tensors, operands, made, (size,), constants=constants(block))
        except Exception as error:
            raise AssertionError(f"{operation.node.op} over {size}: {kinds} -> {results}") from error
        done += 1
    return done


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[f"{op}-{index}" for index, (op, _, _) in enumerate(CASES)])
def test_row_is_exact(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block, tensors = build(op, args, kwargs)
    if not op.startswith(NO_VALUES):
        check(block, tensors, 2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some.data())
def test_products_of_repeated_elements(data: some.DataObject) -> None:
    """Equations of which an operand has one element where others have many: a sum over it is not a sum of its shards."""
    letters = "bsdk"
    terms = [data.draw(some.permutations(letters).map(lambda p: "".join(p[:3]))) for _ in range(2)]
    both = sorted(set("".join(terms)))
    result = data.draw(some.lists(some.sampled_from(both), unique=True, max_size=3).map("".join))
    sizes = {letter: data.draw(some.sampled_from((2, 4))) for letter in both}
    shapes = [[1 if data.draw(some.integers(0, 3)) == 0 else sizes[letter] for letter in term] for term in terms]
    largest = {x: max(s[w.index(x)] for w, s in zip(terms, shapes, strict=True) if x in w) for x in both}
    if any(largest[letter] == 1 for letter in both):
        return
    torch.manual_seed(0)
    block, tensors = build("aten.einsum", (f"{terms[0]},{terms[1]}->{result}", tuple(t(*shape) for shape in shapes)), {})
    check(block, tensors, 2)


def test_every_row_has_a_case() -> None:
    proven = {canonical(op) for op, _, _ in CASES}
    assert not set(table.ROWS) - proven - set(OPTIONAL)


def test_an_element_that_is_repeated_along_a_sum_is_no_addend() -> None:
    """``einsum("bsd,bsd->bs", x, y)`` with y of one element along d: a rule once took y for a bias, which only one rank adds."""
    block, _ = build("aten.einsum", ("bsd,bsd->bs", (t(2, 3, 4), t(2, 3, 1))), {})
    (operation,) = CapturedBlock(block, 8).operations
    row = table.row(operation.call)
    assert row is not None
    axes, cut = Axes(("tp",), (2,)), (Cut(2, 2),)
    assert carry(row, axes, [cut, ("R",)], (True, True), [None]) == [("P",)]
    for kind in ("P", "I"):
        with pytest.raises(NotCarried):
            carry(row, axes, [cut, (kind,)], (True, True), [None])


@pytest.mark.parametrize(("text", "value"), [("1 / 4", 0.25), ("float(8)", 8.0), ('float("-inf")', -math.inf), ("3 * 2 // 3", 2)])
def test_numbers_of_a_text(text: str, value: float) -> None:
    found = Reader(frozenset(), {}).value(ast.parse(text, mode="eval").body)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["float(None)", 'float("x")', "float((1,))", f"{10**400} / 3", f"float({10**400})", "1 / 0", "7 // 2"]
)
def test_a_text_of_no_number_is_refused(text: str) -> None:
    with pytest.raises(NotProven):
        Reader(frozenset(), {}).value(ast.parse(text, mode="eval").body)
