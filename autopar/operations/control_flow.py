"""Operations that have others inside: ``ap.cond`` and ``ap.while_loop`` (see `ir.regions`), whose batch may be sharded where all
regions act batchwise; and a module that was left whole,
``ap.opaque((arguments, parameters, buffers), key, names, training, batchwise)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from autopar.ir.dims import Dim, Shape, has_batch
from autopar.ir.graph import Arg, Node, Symbol, Value
from autopar.ir.regions import REGION_OPS, Region, regions_of
from autopar.operations.notation.notation import FactorKind
from autopar.operations.notation.rule import DerivedLine, Rule, match_rule
from autopar.operations.notation.spelling import function
from autopar.operations.operation import Operation, several

RuleOf = Callable[[str], Rule | None]
OPAQUE = "ap.opaque"


def regions_line(rule_of: RuleOf, node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """The batch at dimension 0 of operands and results, where each example's result depends on that example alone; no line
    where a region does anything else, and every rank computes it whole. `rule_of` finds those of the table."""
    first, second = regions_of(node)
    if node.op == "ap.cond":
        operands = shapes[1:]
        results = _batched_results(first, operands, rule_of)
        agrees = results is not None and results == _batched_results(second, operands, rule_of)
    else:
        count = len(node.args[0]) if isinstance(node.args[0], tuple) else 0
        carried, results = shapes[:count], _batched_results(second, shapes, rule_of)
        agrees = results == [_is_batched(shape) for shape in carried] and _batched_results(first, shapes, rule_of) == [False]
    wanted = dict(node.kwargs).get("results")
    if results is not None and isinstance(wanted, tuple):
        results = [results[int(number)] for number in wanted]  # type: ignore[arg-type]
    batch = next((shape[0] for shape in shapes if _is_batched(shape)), None)
    if batch is None or results is None or not agrees or not all(results):
        return None
    words = [_words(f"i{number}", shape, batch) for number, shape in enumerate(shapes)]
    made = [_words(f"o{number}", value.shape, batch) for number, value in enumerate(node.outputs)]
    return DerivedLine(f"{', '.join(words)} -> {', '.join(made)}")


def _is_batched(shape: Shape) -> bool:
    return bool(shape) and has_batch(shape[0])


def _words(prefix: str, shape: Shape, batch: Dim | None) -> str:
    words = ("b" if dim == 0 and size == batch else f"{prefix}d{dim}!" for dim, size in enumerate(shape))
    return " ".join(words) or "()"


def _batched_results(region: Region, shapes: Sequence[Shape], rule_of: RuleOf) -> list[bool] | None:
    """Return which results have the batch at dimension 0; None where the region is not batchwise."""
    values = {name: Value(name, shape, "float32") for name, shape in zip(region.arguments, shapes, strict=True)}
    batched = {name for name, value in values.items() if _is_batched(value.shape)}
    if any(has_batch(size) for value in values.values() for size in value.shape[1:]):
        return None
    for node in region.nodes:
        if node.op in REGION_OPS or any(map(_has_size, (*node.args, *(arg for _, arg in node.kwargs)))):
            return None
        if batched & set(node.operands()):
            if not _is_batchwise(node, values, batched, rule_of):
                return None
            batched |= {value.name for value in node.outputs}
        elif any(has_batch(size) for value in node.outputs for size in value.shape):
            return None
        values |= {value.name: value for value in node.outputs}
    return [name in batched for name in region.results]


def _has_size(arg: Arg) -> bool:
    return isinstance(arg, Symbol) or (isinstance(arg, tuple) and any(map(_has_size, arg)))


def _is_batchwise(node: Node, values: Mapping[str, Value], batched: set[str], rule_of: RuleOf) -> bool:
    """Return whether one plain factor is dimension 0 of all batched operands and of all results, and nothing else."""
    rule = rule_of(node.op)
    try:
        found = None if rule is None else match_rule(rule, node, tuple(values[name].shape for name in node.operands()))
    except (ValueError, TypeError, IndexError):
        return False
    if rule is None or found is None:
        return False
    fitted = found[0]
    sides = [*zip((name in batched for name in node.operands()), fitted.operands, strict=True)]
    sides += [(True, terms) for terms in fitted.results]
    heads = {terms[0] if terms else () for has, terms in sides if has}
    if len(heads) != 1 or len(head := heads.pop()) != 1:
        return False
    (factor,) = head
    alone = all(sum(factor in term for term in terms) == int(has) for has, terms in sides)
    kinds = {each.name: each.kind for each in fitted.factors}
    return alone and kinds.get(factor) is FactorKind.PLAIN and all(each.factor != factor for each in rule.functions)


def opaque_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Declared batchwise, the batch of arguments and results may be sharded, and nothing else; else there is no line, and every
    rank computes it whole."""
    _, _, names, _, batchwise = node.args
    arguments = len(str(names).split())
    batch = next((shape[0] for shape in shapes[:arguments] if shape), None)
    if not batchwise or batch is None or any(not value.shape or value.shape[0] != batch for value in node.outputs):
        return None
    operands = [_words(f"i{at}", shape, batch if at < arguments else None) for at, shape in enumerate(shapes)]
    results = [_words(f"o{number}", value.shape, batch) for number, value in enumerate(node.outputs)]
    return DerivedLine(f"{', '.join(operands)} -> {', '.join(results)}")


def control_flow(rule_of: RuleOf) -> tuple[Operation, ...]:
    """The records, which need the rules of what is inside."""
    line = partial(regions_line, rule_of)
    return (
        *several(Operation("ap", line, spelling=function("C")), "cond while_loop"),
        Operation(OPAQUE, opaque_rule, spelling=lambda call: f"C.opaque({call.listed()}, self.mesh)"),
    )
