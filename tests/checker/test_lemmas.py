"""Every lemma, proven by execution: whatever kinds of operands a function accepts on its axis, its ranks make what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checker.test_rows import CASES, assignments, kinds_of, placement_of
from support.models.operation_examples import build
from support.oracles.simulate_ranks import assert_sharded_equals_whole

from autopar.checker.captured import CapturedBlock, canonical
from autopar.checker.rows.lemmas import LEMMAS, Unfit
from autopar.checker.rows.table import SAME
from autopar.operations.table import operation as record
from autopar.rules.expand import block_strategies
from autopar.rules.registry import default_registry

OPERATIONS = {op for lemma in LEMMAS.values() for op in SAME.get(lemma.of, (lemma.of,))}
PROVEN = [(index, each) for index, each in enumerate(CASES) if canonical(each[0]) in OPERATIONS]


@pytest.mark.parametrize(("op", "args", "kwargs"), [each for _, each in PROVEN], ids=[f"{each[0]}-{i}" for i, each in PROVEN])
def test_lemma_is_exact(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Of the functions that the compiler has for a node (others never stand in a program)."""
    torch.manual_seed(0)
    block, tensors = build(op, args, kwargs)
    captured, values = CapturedBlock(block, 8), block.values()
    (operation,) = captured.operations
    for size in (2, 4):
        found = block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=default_registry())
        functions = {each.function for each in found[block.nodes[0].name]} & LEMMAS.keys()
        assert functions <= {each.name for each in record(op).functions}
        for function in functions:
            lemma = LEMMAS[function]
            shapes = operation.call.shapes
            choices = [
                kinds_of(shape, values[name].differentiable, size) for name, shape in zip(operation.operands, shapes, strict=True)
            ]
            flows = [values[name].differentiable for name in operation.operands]
            done = 0
            offered = [each for each in found[block.nodes[0].name] if each.function == function]
            for kinds in assignments(choices, 0):
                try:
                    result = lemma.on_axis(operation.call, kinds, size, flows)
                except Unfit:
                    continue
                operands = [(placement_of(kind, shape, size),) for kind, shape in zip(kinds, shapes, strict=True)]
                placed = [(placement_of(result, shape, size),) for shape in operation.call.results]
                if not any(each.operands == tuple(p for (p,) in operands) for each in offered):
                    continue
                assert_sharded_equals_whole(operation.node, tensors, operands, placed, (size,), function)
                done += 1
            for each in offered:  # none that the compiler offers is refused
                own = tuple(_kind(place, shape, size) for place, shape in zip(each.operands, shapes, strict=True))
                assert str(_placement(lemma.on_axis(operation.call, own, size, flows), operation.call.results[0], size)) == str(
                    each.results[0]
                )


def _kind(place: Any, shape: Any, size: int) -> Any:
    from autopar.checker.shards import Cut

    dim = getattr(place, "dim", None)
    return Cut(dim, shape[dim] // size // place.parts) if dim is not None else str(place)


def _placement(kind: Any, shape: Any, size: int) -> Any:
    return placement_of(kind, shape, size)
