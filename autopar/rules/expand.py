"""Rules x one mesh axis -> strategies of every node; and their product over the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from autopar.errors import UnsupportedOp
from autopar.ir.dims import Dim, Shape, has_batch
from autopar.ir.graph import Block, DType, Node, Value
from autopar.ir.placement import Invariant, Partial, Placement, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import NodePlan
from autopar.rules.parts import Cut, Fitted, cuts, majors, reads_in
from autopar.rules.registry import Registry
from autopar.rules.rule import NamedFunction, Rule, match
from autopar.rules.strategy import PASS, REDUNDANT, AxisStrategy

_WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def block_strategies(
    block: Block, axis_size: int, *, batch_axis: bool, batch_is_symbolic: bool, registry: Registry
) -> dict[str, tuple[AxisStrategy, ...]]:
    """What every node of a block may do on one mesh axis, by node name.

    The batch axis cuts sizes that hold ``B``, model axes the others; where the batch is not symbolic, either cuts anything.
    Every node has at least its redundant strategies.
    """

    def shardable(size: Dim, parts: int) -> bool:
        if (batch_is_symbolic and has_batch(size) != batch_axis) or (axis_size == 1 and not batch_axis):
            return False
        return reads_in(size, parts) if has_batch(size) else size % (parts * axis_size) == 0 and size > 1  # type: ignore[operator]

    values = block.values()
    fitted = {item.node.name: item for node in block.nodes if (item := fit_node(node, values, registry)) is not None}
    chosen = cuts(fitted.values(), shardable, keep_all=batch_axis)
    out: dict[str, tuple[AxisStrategy, ...]] = {}
    for node in block.nodes:
        found: dict[tuple[object, ...], AxisStrategy] = {}
        for strategy in _strategies(node, values, fitted.get(node.name), chosen.get(node.name, []), registry.rule(node.op)):
            found.setdefault((strategy.operands, strategy.results, strategy.function), strategy)
        out[node.name] = tuple(found.values())
    return out


def missing_rules(block: Block, registry: Registry) -> tuple[Node, ...]:
    """The nodes that can only be computed redundantly, since no rule fits them."""
    values = block.values()
    return tuple(node for node in block.nodes if fit_node(node, values, registry) is None)


def fit_node(node: Node, values: Mapping[str, Value], registry: Registry) -> Fitted | None:
    """The node's line, fitted to its global shapes; None where none covers it. UnsupportedOp where a user's does not fit."""
    rule = registry.rule(node.op)
    if rule is None:
        return None
    try:
        found = match(rule, node, tuple(values[name].shape for name in node.operands()))
    except (ValueError, TypeError, IndexError) as error:
        if rule.registered:
            raise UnsupportedOp(
                f"{node.op} at {node.source or node.name}: {error}; mend the rule given to register_rule"
            ) from error
        return None
    if found is None:
        return None
    line, derived = found
    sizes = {factor.name: factor.size for factor in line.factors}
    marks = {factor.name: factor.mark for factor in line.factors}
    return Fitted(node, line, derived.minors, sizes, marks)


def _strategies(
    node: Node, values: Mapping[str, Value], fitted: Fitted | None, chosen: Sequence[Cut], rule: Rule | None
) -> Iterator[AxisStrategy]:
    operands = [values[name] for name in node.operands()]
    flows = any(value.differentiable for value in node.outputs)
    free = not flows and any(value.differentiable for value in operands)
    if fitted is not None:
        for cut in chosen:
            strategy = factor_strategy(fitted, cut, operands, rule)
            if strategy is not None:
                yield strategy
                if free:  # no gradient comes back: an operand may as well be Invariant
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
    if flows and rule is not None and _may_pass(node, operands):
        yield from _passing(node, operands, rule)


def factor_strategy(fitted: Fitted, cut: Cut, operands: Sequence[Value], rule: Rule | None) -> AxisStrategy | None:
    """The strategy that cuts one factor: operands and results that have it are Shard there.

    An operand without it is Replicate; but one of floating point beside a summed factor is an addend (a bias): Partial.
    """
    factor, parts = cut
    node, summed = fitted.node, fitted.marks[factor] == "+"
    function = next((item for item in rule.functions if item.factor == factor), None) if rule else None
    if summed and parts > 1 and function is not None:
        return None  # a function needs to know which part of the factor it has

    def place(terms: tuple[tuple[str, ...], ...], otherwise: Placement) -> Placement:
        for dim, term in enumerate(terms):
            if factor in term:
                above = majors(fitted, term, factor)
                assert above is not None
                return Shard(dim, above * parts)
        return otherwise

    addends = summed and (rule is None or rule.addends)
    missing = [Partial() if addends and value.dtype in _WIDTH else Replicate() for value in operands]
    sides = zip(fitted.match.operands, missing, strict=True)
    result: Placement = Partial() if summed else Replicate()
    results = tuple(place(terms, result) for terms in fitted.match.results)
    if function is not None and function.result is not None:
        results = tuple(function.result if value.differentiable else Replicate() for value in node.outputs)
    label = factor if parts == 1 else f"{factor}({parts})"
    strategy = AxisStrategy(tuple(place(terms, other) for terms, other in sides), results, label)
    return strategy if function is None else _with_function(strategy, function, node, operands)


def _with_function(strategy: AxisStrategy, function: NamedFunction, node: Node, operands: Sequence[Value]) -> AxisStrategy:
    told = function.collectives(node, tuple(value.shape for value in operands)) if function.collectives else ()
    return AxisStrategy(strategy.operands, strategy.results, strategy.label, function.name, told)


def _invariant_operands(strategy: AxisStrategy, operands: Sequence[Value]) -> AxisStrategy:
    changed = tuple(
        Invariant() if value.differentiable and placement == Replicate() else placement
        for value, placement in zip(operands, strategy.operands, strict=True)
    )
    return AxisStrategy(changed, strategy.results, strategy.label, strategy.function, strategy.collectives)


def _may_pass(node: Node, operands: Sequence[Value]) -> bool:
    """Sums may be cast to a type that holds them exactly, and not to a narrower one; a scalar beside a sum is not linear."""
    if any(isinstance(arg, DType) for arg in node.args):
        source, target = operands[0].dtype, node.outputs[0].dtype
        return _WIDTH.get(target, 0) > _WIDTH.get(source, 9) or source == target
    if node.op in ("aten.add.Tensor", "aten.sub.Tensor"):
        return len(operands) == 2
    return node.op != "aten.div.Tensor" or node.operands()[:1] == (getattr(node.args[0], "name", None),)


def _passing(node: Node, operands: Sequence[Value], rule: Rule) -> Iterator[AxisStrategy]:
    for group in rule.passes:
        chosen = range(len(operands)) if isinstance(group, str) else group
        if not all(index < len(operands) and operands[index].differentiable for index in chosen):
            continue
        places = tuple(Partial() if index in chosen else Replicate() for index in range(len(operands)))
        yield AxisStrategy(places, (Partial(),) * len(node.outputs), PASS)


def combine(
    per_axis: Sequence[Sequence[AxisStrategy]], node: Node, values: Mapping[str, Value], axis_sizes: Sequence[int]
) -> tuple[NodePlan, ...]:
    """The product of one node's strategies over the axes of a mesh (outermost first), without those that do not divide or nest.

    At most one axis runs a named function. Equal plans appear once.
    """
    shapes = [values[name].shape for name in node.operands()]
    results = [value.shape for value in node.outputs]
    out: dict[tuple[object, ...], NodePlan] = {}
    known: dict[tuple[object, ...], bool] = {}

    def divides(shape: Shape, placements: Placements) -> bool:
        key = shape, placements
        if key not in known:
            known[key] = can_shard(shape, placements, axis_sizes)
        return known[key]

    for chosen in product(*per_axis):
        functions = [item.function for item in chosen if item.function]
        if len(functions) > 1:
            continue
        operands: tuple[Placements, ...] = tuple(zip(*(item.operands for item in chosen), strict=True))
        produced: tuple[Placements, ...] = tuple(zip(*(item.results for item in chosen), strict=True))
        sides = (*zip(shapes, operands, strict=True), *zip(results, produced, strict=True))
        if all(divides(shape, placements) for shape, placements in sides):
            function = functions[0] if functions else ""
            plan = NodePlan(node.name, operands, produced, tuple(item.label for item in chosen), function)
            out.setdefault((operands, produced, function), plan)
    return tuple(out.values())
