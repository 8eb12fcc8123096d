"""Every line of the table, proven by execution: shard, run, recombine, compare, forward and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.operation_examples import build, constants, single_operations
from support.models.operations.further_examples import OPTIONAL, further_operations
from support.oracles.simulate_ranks import LABELS, assert_sharded_equals_whole

from autopar.ir.dims import Dim
from autopar.ir.graph import Block
from autopar.ir.placement import Placements, Replicate, Shard
from autopar.ir.plan import NodePlan
from autopar.operations.factories import whole_rule
from autopar.rules.expand import block_strategies, combine_axes, factor_strategy, fit_node, missing_rules
from autopar.rules.fused_shards import is_legal
from autopar.rules.registry import AxisStrategy, Registry, default_registry

REGISTRY = default_registry()
CASES = [*single_operations(), *further_operations()]
UNDEFINED = ("aten.empty", "aten.new_empty")  # results without defined values: shapes only
PROVEN_WITH_ITS_MODULE = {"ap.opaque", "ap.cond", "ap.while_loop"}
"""`tests/verification/test_opaque.py`, `tests/e2e/control_flow`: the operation calls a module of the user's, or has branches."""
WHOLE = {op for op, rule in REGISTRY.rules.items() if rule.line is whole_rule}


def every_cut(block: Block, size: int) -> Iterator[AxisStrategy]:
    """Strategies for every factor in up to three parts, also those that `cuts` finds not worth offering."""

    def shardable(extent: Dim, parts: int) -> bool:
        return extent % (parts * size) == 0  # type: ignore[operator]

    node, values = block.nodes[0], block.values()
    fitted = fit_node(node, values, REGISTRY)
    assert fitted is not None
    fitted = replace(fitted, minors=True)
    operands = [values[name] for name in node.operands()]
    for factor in fitted.sizes:
        for parts in (1, 2, 3):
            if is_legal(fitted, (factor, parts), shardable):
                strategy = factor_strategy(fitted, (factor, parts), operands, REGISTRY.rule(node.op))
                if strategy is not None:
                    yield strategy


def offered(block: Block, size: int, registry: Registry = REGISTRY) -> tuple[AxisStrategy, ...]:
    found = block_strategies(block, size, batch_axis=False, batch_is_symbolic=False, registry=registry)
    return found[block.nodes[0].name]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[f"{op}-{index}" for index, (op, _, _) in enumerate(CASES)])
def test_line_is_exact(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    block, tensors = build(op, args, kwargs)
    node, without = block.nodes[0], constants(block)
    undefined = op.startswith(UNDEFINED)
    if missing_rules(block, REGISTRY):
        few = "aten.index.Tensor", "aten.index_put", "aten.histc"
        assert op in few or "loss" in op or "entropy" in op, "only few have forms without a line"
    for size in (2, 4):
        strategies = dict.fromkeys(offered(block, size))
        if not missing_rules(block, REGISTRY):
            strategies |= dict.fromkeys(every_cut(block, size))
        for strategy in strategies:
            if undefined:
                continue
            operands = [(placement,) for placement in strategy.operands]
            results = [(placement,) for placement in strategy.results]
            try:
                assert_sharded_equals_whole(node, tensors, operands, results, (size,), strategy.function, constants=without)
            except Exception as error:
                raise AssertionError(f"{node.op} over {size}, {strategy}") from error


def test_every_entry_has_a_proof() -> None:
    proven: dict[str, int] = {}
    for op, args, kwargs in CASES:
        block, _ = build(op, args, kwargs)
        strategies = [s for s in offered(block, 2) if s.factor not in ("redundant", "pass")]
        for key in (op, ".".join(op.split(".")[:2])):
            proven[key] = proven.get(key, 0) + len(strategies)
    without = [op for op in REGISTRY.rules if op not in {*WHOLE, *PROVEN_WITH_ITS_MODULE, *OPTIONAL} and not proven.get(op)]
    assert not without, f"no sharded case in tests/support/models/operation_examples.py for {without}"


def _has_line(index: int) -> bool:
    op, args, kwargs = CASES[index]
    if op.startswith(UNDEFINED) or op == "aten.to.dtype":  # values that nobody defines; float64 rounded to float32
        return False
    block, _ = build(op, args, kwargs)
    return not missing_rules(block, REGISTRY)


TWO_AXES = [index for index in range(len(CASES)) if _has_line(index)]


def unlike(plans: Iterable[NodePlan], axis: Iterable[AxisStrategy]) -> Iterator[NodePlan]:
    """The plans of a mesh of 2 x 2 but for those whose ranks compute what others do: a strategy of one `axis`, which the other
    axis repeats (`test_line_is_exact` runs it), or an earlier plan with the axes exchanged. Where both cut one dimension, which
    of them is the outer one makes a difference."""
    single = {((*each.operands, *each.results), each.function) for each in axis}
    earlier = set[tuple[tuple[Placements, ...], str]]()
    for plan in plans:
        values = (*plan.operands, *plan.results)
        repeated = [number for number in (0, 1) if all(each[number] == Replicate() for each in values)]
        if any((tuple(each[1 - number] for each in values), plan.function) in single for number in repeated):
            continue
        nested = any(isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim for a, b in values)
        if nested or (tuple(each[::-1] for each in values), plan.function) not in earlier:
            earlier.add((values, plan.function))
            yield plan


@pytest.mark.parametrize(  # one axis is proven of every case, and what two are is the same for all rules
    "index", [pytest.param(index, marks=pytest.mark.slow if place % 3 else ()) for place, index in enumerate(TWO_AXES)]
)
def test_two_axes_are_exact(index: int) -> None:
    torch.manual_seed(0)
    block, tensors = build(*CASES[index])
    node, without = block.nodes[0], constants(block)
    sizes = (2, 2)
    axis = dict.fromkeys(offered(block, 2)) | dict.fromkeys(every_cut(block, 2))
    labelled = [tuple(axis), tuple(axis)]
    for plan in unlike(combine_axes(labelled, node, block.values(), sizes), axis):
        function_axis = 0
        if plan.function:
            word = LABELS[plan.function]
            function_axis = next(axis for axis, label in enumerate(plan.factors) if label == word or label[:-1] == word)
        try:
            places = (plan.operands, plan.results)
            assert_sharded_equals_whole(node, tensors, *places, sizes, plan.function, function_axis, constants=without)
        except Exception as error:
            raise AssertionError(f"{node.op}: {plan}") from error
