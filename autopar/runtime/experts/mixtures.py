"""The mixtures of experts of a program whose experts are sharded over a mesh axis, as its text says it.

The text is what runs, of an exported program too: a weight is an expert matrix only where the operation takes it as it is stored,
and nothing else reads it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import NamedTuple

from ..comm.conversions import shard_of
from ..module import BlockModule, Program

_CALLS = ("moe_experts_owned", "moe_experts_dispatched", "moe_experts_start")


class ExpertMixture(NamedTuple):
    """The mixture of experts of one block: the `experts` are sharded over the mesh axis `axis`. `names`: the parameters that have
    a part for each expert along dimension 0. `stage`: that of the pipeline which has the block."""

    layer: str
    axis: str
    experts: int
    names: tuple[str, ...]
    stage: int


def expert_mixtures(program: Program) -> Iterator[tuple[ExpertMixture, BlockModule]]:
    """The mixtures of all stages in the model's order, each with its block. Blocks with several have none."""
    roots = [(root.position, stage, root) for stage, roots in enumerate(program.roots()) for root in roots]
    known: dict[type, tuple[str, list[str]] | None] = {}
    for _, stage, root in sorted(roots, key=lambda each: each[:2]):
        for block in root.blocks():
            kind = next(each for each in type(block).__mro__ if "specs" in vars(each) or each is BlockModule)  # FSDP2 adds one
            if kind not in known:
                known[kind] = _mixture_of(kind)
            mixture = known[kind]
            if mixture is None:
                continue
            specs = {spec.attribute: spec for spec in block.specs if spec.attribute in mixture[1]}
            shards = [shard_of(spec.placements.get(mixture[0], "I")) for spec in specs.values()]
            names = tuple(block.original_names[spec.path] for spec in specs.values())
            if all(shard == (0, 1) for shard in shards) and len({spec.shape[0] for spec in specs.values()}) == 1:
                count = next(iter(specs.values())).shape[0]
                yield ExpertMixture(block.prefix or names[0], mixture[0], count, names, stage), block


def _mixture_of(kind: type) -> tuple[str, list[str]] | None:
    """Return the mesh axis and the attributes of the experts' matrices of a class of blocks; None where they are computed, or
    used elsewhere too."""
    functions = [each for each in vars(kind).values() if isinstance(each, FunctionType)]
    try:
        trees = [ast.parse(textwrap.dedent(inspect.getsource(each))) for each in functions]
    except (OSError, TypeError):
        return None
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _CALLS]
    axis = next((word.value for call in calls for word in call.keywords if word.arg == "axis"), None)
    if len(calls) != 1 or axis is None:
        return None
    values = dict(pair for node in nodes if isinstance(node, ast.Assign) for pair in _assignments(node))
    uses = [node.id if isinstance(node, ast.Name) else ast.unparse(node) for node in nodes
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load)]  # fmt: skip
    attributes = [_stored(each, ast.unparse(axis), values, uses) for each in calls[0].args[3:] if ast.unparse(each) != "None"]
    path = ast.unparse(values.get(ast.unparse(axis), axis)).split(".")
    if path[:-1] != ["self", "mesh"] or not all(attributes):
        return None
    return path[-1], [each for each in attributes if each]


def _assignments(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """The names that an assignment sets, each with its value; of a conversion of several tensors with that of its own."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple):
        yield ast.unparse(target), value
    elif isinstance(value, ast.Call) and value.args and isinstance(value.args[0], ast.Tuple):
        for name, each in zip(target.elts, value.args[0].elts, strict=False):
            yield ast.unparse(name), ast.Call(value.func, [each, *value.args[1:]], value.keywords)


def _stored(value: ast.expr, axis: str, values: Mapping[str, ast.expr], uses: list[str]) -> str | None:
    """Return the attribute whose matrices `value` has, converted on other axes or to another dtype perhaps; None where it is
    computed of more, or read elsewhere too."""
    if isinstance(value, (ast.Name, ast.Attribute)) and uses.count(ast.unparse(value)) != 1:
        return None
    if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "self":
        return value.attr
    if isinstance(value, ast.Name) and value.id in values:
        return _stored(values[value.id], axis, values, uses)
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return None
    if value.func.attr == "to":
        return _stored(value.func.value, axis, values, uses)
    converts = value.func.attr in ("convert", "convert_many", "start") and ast.unparse(value.args[1]) != axis
    return _stored(value.args[0], axis, values, uses) if converts or value.func.attr == "wait" else None
