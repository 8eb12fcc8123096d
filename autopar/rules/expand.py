"""Expands sharding rules into strategies: those of each node on one mesh axis, and their combinations over all axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from autopar.errors import UnsupportedOp
from autopar.ir.dims import Dim, Shape, divisible, has_batch
from autopar.ir.graph import Block, DType, Node, Ref, Value
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import NodePlan
from autopar.operations.notation.notation import FactorKind, FittedRule, parse_rule
from autopar.operations.notation.rule import Derive, DerivedLine, NamedFunction, Rule, match_rule
from autopar.operations.notation.rule import fit_to_node as refit
from autopar.rules.fused_shards import (
    FactorShard,
    FittedNode,
    Shardable,
    divides_evenly,
    major_parts,
    sharded_dims,
    useful_shards,
)
from autopar.rules.registry import PASS, REDUNDANT, AxisStrategy, Registry

_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}


def block_strategies(
    block: Block, axis_size: int, *, batch_axis: bool, batch_is_symbolic: bool, registry: Registry, any_size: bool = False
) -> dict[str, tuple[AxisStrategy, ...]]:
    """The strategies of every node of a block on one mesh axis, by node name.

    The batch axis shards sizes in ``B``, model axes the others; with `any_size` a model axis shards both, and where the batch is
    not symbolic, every axis does. Every node has at least its redundant strategies.
    """

    def shardable(size: Dim, parts: int) -> bool:
        if axis_size == 1 and not batch_axis:
            return False
        if batch_is_symbolic and not any_size and has_batch(size) != batch_axis:
            return False
        if has_batch(size):
            return divides_evenly(size, parts) and divisible(size, parts * axis_size)
        return size % (parts * axis_size) == 0 and size > 1  # type: ignore[operator]

    values = block.values()
    fitted = {item.node.name: item for node in block.nodes if (item := fit_node(node, values, registry)) is not None}
    chosen = useful_shards(fitted.values(), shardable, keep_all=batch_axis)
    frozen = not any(value.differentiable for value in values.values())
    out: dict[str, tuple[AxisStrategy, ...]] = {}
    for node in block.nodes:
        found: dict[tuple[object, ...], AxisStrategy] = {}
        rule, fit = registry.rule(node.op), fitted.get(node.name)
        for strategy in _strategies(node, values, fit, chosen.get(node.name, []), rule, frozen):
            if strategy.function and not _enough_on_each(strategy, node, values, rule, axis_size):
                continue
            found.setdefault((strategy.operands, strategy.results, strategy.function), strategy)
        for strategy in joint_strategies(node, values, fit, rule, shardable) if rule is not None and rule.functions else ():
            found.setdefault((strategy.operands, strategy.results, strategy.function), strategy)
        out[node.name] = tuple(found.values())
    return out


def _enough_on_each(strategy: AxisStrategy, node: Node, values: Mapping[str, Value], rule: Rule | None, axis_size: int) -> bool:
    """Return whether the strategy's function can run on an axis of this size."""
    function = next((item for item in rule.functions if item.name == strategy.function), None) if rule else None
    if function is None or function.most_ranks is None:
        return True
    return axis_size <= function.most_ranks(node, tuple(values[name].shape for name in node.operands()))


def missing_rules(block: Block, registry: Registry) -> tuple[Node, ...]:
    """The nodes that no rule fits: they are computed redundantly on every rank."""
    values = block.values()
    return tuple(node for node in block.nodes if fit_node(node, values, registry) is None)


def fit_node(node: Node, values: Mapping[str, Value], registry: Registry) -> FittedNode | None:
    """The node with its rule fitted to its global shapes; None where no rule covers it. UnsupportedOp where a registered rule
    does not fit."""
    rule = registry.rule(node.op)
    if rule is None:
        return None
    try:
        found = match_rule(rule, node, tuple(values[name].shape for name in node.operands()))
    except (ValueError, TypeError, IndexError) as error:
        if rule.registered:
            raise UnsupportedOp(
                f"{node.op} at {node.source or node.name}: {error}; mend the rule given to register_rule"
            ) from error
        return None
    if found is None:
        return None
    return _fitted(node, *found)


def _fitted(node: Node, match: FittedRule, derived: DerivedLine) -> FittedNode:
    sizes = {factor.name: factor.size for factor in match.factors}
    kinds = {factor.name: factor.kind for factor in match.factors}
    return FittedNode(node=node, match=match, minors=derived.minors, sizes=sizes, kinds=kinds, addends=derived.addends)


def _strategies(
    node: Node, values: Mapping[str, Value], fitted: FittedNode | None, chosen: Sequence[FactorShard], rule: Rule | None,
    frozen: bool,
) -> Iterator[AxisStrategy]:  # fmt: skip
    """`frozen`: no value of the block has a gradient, so its sums are what a block that trains calls differentiable."""
    operands = [values[name] for name in node.operands()]
    flows = any(value.differentiable for value in node.outputs)
    free = not flows and any(value.differentiable for value in operands)
    if fitted is not None:
        for shard in chosen:
            strategy = factor_strategy(fitted, shard, operands, rule)
            if strategy is not None:
                yield strategy
                if free:  # no gradient flows back: an operand may also be Invariant
                    yield _invariant_operands(strategy, operands)
    redundant = AxisStrategy((Replicate(),) * len(operands), (Replicate(),) * len(node.outputs), REDUNDANT)
    if flows:
        equal = [
            tuple(Invariant() if value.differentiable else Replicate() for value in side) for side in (operands, node.outputs)
        ]
        yield AxisStrategy(equal[0], equal[1], REDUNDANT)
    yield redundant
    if free:
        yield _invariant_operands(redundant, operands)
    sums = flows or (frozen and all(value.dtype in _WIDTH for value in node.outputs)) or all(map(_is_number, node.outputs))
    if sums and rule is not None and _may_pass(node, operands):
        yield from _passing(node, operands, rule, frozen)


def factor_strategy(fitted: FittedNode, shard: FactorShard, operands: Sequence[Value], rule: Rule | None) -> AxisStrategy | None:
    """The strategy that shards one factor: operands and results are Shard in the dimensions that have it.

    An operand without it is Replicate; but beside a summed factor, a floating-point operand is an addend (a bias) and Partial.
    """
    factor, parts = shard
    function = next((item for item in rule.functions if item.factor == factor and not _joint(item)), None) if rule else None
    if function is not None and not function.fits(fitted.node, _shapes(operands)):
        return None
    if fitted.kinds[factor] is FactorKind.SUMMED and parts > 1 and function is not None:
        return None  # a function must know which part of the factor it has
    return shard_strategy(fitted, (factor,), parts, operands, rule, function)


def shard_strategy(
    fitted: FittedNode, factors: tuple[str, ...], parts: int, operands: Sequence[Value], rule: Rule | None,
    function: NamedFunction | None,
) -> AxisStrategy | None:  # fmt: skip
    """The strategy that shards all of `factors` together; None where it would shard one tensor in two dimensions."""
    summed = all(fitted.kinds[factor] is FactorKind.SUMMED for factor in factors)

    def place(terms: tuple[tuple[str, ...], ...], otherwise: Placement) -> Placement:
        for dim, term in enumerate(terms):
            for factor in factors:
                if factor in term:
                    above = major_parts(fitted, term, factor)
                    assert above is not None
                    return Shard(dim, above * parts)
        return otherwise

    tensors = (*fitted.match.operands, *fitted.match.results)
    if len(factors) > 1 and any(sum(factor in term for term in terms for factor in factors) > 1 for terms in tensors):
        return None
    addends = _addends(fitted, operands, rule) if summed else ()
    missing = [Partial() if index in addends else Replicate() for index in range(len(operands))]
    sides = zip(fitted.match.operands, missing, strict=True)
    result: Placement = Partial() if summed else Replicate()
    results = tuple(place(terms, result) for terms in fitted.match.results)
    if function is not None and function.result is not None:
        results = tuple(function.result if value.differentiable else Replicate() for value in fitted.node.outputs)
    label = " ".join(factors) if parts == 1 else f"{factors[0]}({parts})"
    size = fitted.sizes[factors[0]] if len(factors) == 1 else 0
    operands_at = tuple(place(terms, other) for terms, other in sides)
    strategy = AxisStrategy(operands_at, results, label, factor_size=size // parts if isinstance(size, int) else 0)
    return strategy if function is None else _with_function(strategy, function, fitted.node, operands)


def _addends(fitted: FittedNode, operands: Sequence[Value], rule: Rule | None) -> tuple[int, ...]:
    """The operands that a sum over ranks must count once only."""
    if fitted.addends is not None:
        return fitted.addends
    floating = rule is None or rule.addends
    return tuple(index for index, value in enumerate(operands) if floating and value.dtype in _WIDTH)


def _joint(function: NamedFunction) -> bool:
    return bool(function.also) or function.line is not None


def joint_strategies(
    node: Node, values: Mapping[str, Value], fitted: FittedNode | None, rule: Rule, shardable: Shardable
) -> Iterator[AxisStrategy]:
    """The strategies of named functions that shard several factors at once, or a factor of kind `WHOLE`, or have a line."""
    operands = [values[name] for name in node.operands()]
    shapes = _shapes(operands)
    for function in rule.functions:
        read = fitted if function.line is None else _read(function.line, node, shapes)
        if read is None or not function.fits(node, shapes):
            continue
        if not _joint(function) and read.kinds.get(function.factor) is not FactorKind.WHOLE:
            continue  # `factor_strategy` has it
        named = (function.factor, *function.also)
        leading = [name for name in read.sizes if name.startswith("batch")] if "..." in named else [""]
        for batch in leading:
            factors = tuple(batch if name == "..." else name for name in named)
            if all(name in read.sizes and shardable(read.sizes[name], 1) and sharded_dims(read, (name, 1)) for name in factors):
                strategy = shard_strategy(read, factors, 1, operands, rule, function)
                if strategy is not None:
                    yield strategy


def _read(line: Derive, node: Node, shapes: tuple[Shape, ...]) -> FittedNode | None:
    """The node fitted to a function's own line."""
    derived = line(node, shapes)
    if derived is None:
        return None
    try:
        return _fitted(node, refit(parse_rule(derived.line), derived, node, shapes), derived)
    except ValueError:
        return None


def _shapes(operands: Sequence[Value]) -> tuple[Shape, ...]:
    return tuple(value.shape for value in operands)


def _with_function(strategy: AxisStrategy, function: NamedFunction, node: Node, operands: Sequence[Value]) -> AxisStrategy:
    collectives = function.collectives(node, _shapes(operands)) if function.collectives else ()
    return replace(strategy, function=function.name, collectives=collectives, exclusive=function.exclusive)


def _invariant_operands(strategy: AxisStrategy, operands: Sequence[Value]) -> AxisStrategy:
    changed = tuple(
        Invariant() if value.differentiable and placement == Replicate() else placement
        for value, placement in zip(operands, strategy.operands, strict=True)
    )
    return replace(strategy, operands=changed)


def _may_pass(node: Node, operands: Sequence[Value]) -> bool:
    """Return whether sums of Partial operands stay exact: a cast must not narrow."""
    source, target = operands[0].dtype if operands else "", node.outputs[0].dtype
    cast = any(isinstance(arg, DType) for arg in node.args)
    return not cast or _WIDTH.get(target, 0) > _WIDTH.get(source, 9) or source == target


def _passing(node: Node, operands: Sequence[Value], rule: Rule, frozen: bool) -> Iterator[AxisStrategy]:
    for group in rule.linear_in:
        if group == "first" and not isinstance(node.args[0], Ref):
            continue  # a number divided by a sum
        chosen = {"all": tuple(range(len(operands))), "first": (0,)}[group] if isinstance(group, str) else group
        if not all(index < len(operands) for index in chosen):
            continue
        if not all(_is_sum(operands[index], frozen) or _is_number(operands[index]) for index in chosen):
            continue
        places = tuple(Partial() if index in chosen else Replicate() for index in range(len(operands)))
        yield AxisStrategy(places, (Partial(),) * len(node.outputs), PASS)


def _is_sum(value: Value, frozen: bool) -> bool:
    """Return whether ranks may hold summands of a value: the floating-point ones where nothing has a gradient, else those that
    have."""
    return value.differentiable or (frozen and value.dtype in _WIDTH)


def _is_number(value: Value) -> bool:
    """Return whether a value is one floating-point number, of which ranks add shares to a sum."""
    return all(size == 1 for size in value.shape) and value.dtype in _WIDTH


def _whole_factors(chosen: Sequence[AxisStrategy], axis_sizes: Sequence[int]) -> bool:
    """Return whether the axes that shard one factor divide it together, which the sizes of dimensions do not show: ``(g c!)``."""
    shards: dict[tuple[str, int], int] = {}
    for item, size in zip(chosen, axis_sizes, strict=True):
        if item.factor_size:
            key = item.factor, item.factor_size
            shards[key] = shards.get(key, 1) * size
    return all(size % parts == 0 for (_, size), parts in shards.items())


def _shared(strategy: AxisStrategy, chosen: Sequence[AxisStrategy]) -> bool:
    """Return whether another axis shards a dimension that this strategy shards."""
    dims = [(index, place.dim) for index, place in enumerate(strategy.operands) if isinstance(place, Shard)]
    others = [item for item in chosen if item is not strategy]
    return any(isinstance(place := item.operands[index], Shard) and place.dim == dim for item in others for index, dim in dims)


def combine_axes(
    per_axis: Sequence[Sequence[AxisStrategy]], node: Node, values: Mapping[str, Value], axis_sizes: Sequence[int]
) -> tuple[NodePlan, ...]:
    """The plans of one node on a mesh: all combinations of its strategies on the axes (outermost first) that divide and nest.

    At most one axis runs a named function. Equal plans appear once.
    """
    shapes = [*(values[name].shape for name in node.operands()), *(value.shape for value in node.outputs)]
    sides: list[tuple[Shape, dict[Placements, bool]]] = [(shape, {}) for shape in shapes]
    out: dict[tuple[object, ...], NodePlan] = {}
    for chosen in product(*per_axis):
        functions = [item.function for item in chosen if item.function]
        if len(functions) > 1 or any(item.exclusive and _shared(item, chosen) for item in chosen):
            continue
        if len(chosen) > 1 and not _whole_factors(chosen, axis_sizes):
            continue
        operands: tuple[Placements, ...] = tuple(zip(*(item.operands for item in chosen), strict=True))
        produced: tuple[Placements, ...] = tuple(zip(*(item.results for item in chosen), strict=True))
        for (shape, known), placements in zip(sides, (*operands, *produced), strict=True):
            divides = known.get(placements)
            if divides is None:
                divides = known[placements] = can_shard(shape, placements, axis_sizes)
            if not divides:
                break
        else:
            function = functions[0] if functions else ""
            plan = NodePlan(node.name, operands, produced, tuple(item.factor for item in chosen), function)
            out.setdefault((operands, produced, function), plan)
    return tuple(out.values())
