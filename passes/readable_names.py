"""Renames values for readers of the generated program.

Before::

    %linear_3 = aten.linear(%layer_norm_1, %p_attn_q_weight)     # module attn.q_proj
    %linear_3_full = ap.convert(%linear_3, axis='tp', conversion='S(1) -> R')

After: the result of a layer has the name of its module, that of a conversion the name of its operand and a suffix::

    %q_proj = aten.linear(%ln_1, %attn_q_weight)
    %q_proj_full = ap.convert(%q_proj, axis='tp', conversion='S(1) -> R')
"""

from __future__ import annotations

import builtins
import keyword
import re
from dataclasses import dataclass, replace

from autopar.ir.graph import Block, Node, Value, with_operands
from autopar.operations.communication import CONVERT, CONVERT_MANY, START, WAIT
from autopar.operations.table import operation
from autopar.passes.base import BlockState, Context, fresh_name

RESERVED = frozenset(
    {"torch", "nn", "Tensor", "F", "C", "B", "B_all", "self", "recompute", "inf", "nan", *keyword.kwlist, *dir(builtins)}
)
CLEARER = {
    "slice": "part", "sum": "total", "pow": "power", "abs": "size", "max": "highest", "min": "lowest", "round": "rounded",
    "and": "both", "or": "either", "not": "negated",
}  # fmt: skip
"""Instead of names that shadow builtins."""
TRAILING_NUMBER = re.compile(r"(_\d+)+$")


def identifier(text: str) -> str:
    """Return `text` as a Python identifier that shadows neither a keyword, a builtin nor an import of the program."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_") or "value"
    name = CLEARER.get(name, name)
    return f"x{name}" if name[0].isdigit() else f"{name}_" if name in RESERVED else name


def layer_name(node: Node) -> str | None:
    """Return the name of the module of a layer: ``q_proj``, or ``mlp_0`` where the last part is a number; None for other
    operations."""
    if not node.module or not operation(node.op).layer:
        return None
    parts = node.module.split(".")
    tail = parts[-2:] if parts[-1].isdigit() else parts[-1:]
    return "_".join(tail)


@dataclass(frozen=True, slots=True)
class ReadableNames:
    """Renames every value of a block; inputs and parameters keep their names where these are identifiers."""

    name: str = "readable_names"

    def run(self, state: BlockState, context: Context) -> BlockState:
        block, names = state.block, {*context.mesh.names}
        renamed: dict[str, str] = {}
        roots: dict[str, str] = {}
        for value in block.inputs:
            renamed[value.name] = fresh_name(identifier(value.name), names)
        for parameter in block.parameters:
            renamed[parameter.value.name] = fresh_name(identifier(parameter.path), names)
        for node in block.nodes:
            for index, value in enumerate(node.outputs):
                if node.op in (CONVERT, CONVERT_MANY, START, WAIT):
                    source = node.operands()[index]
                    roots[value.name] = roots.get(source, source)
                renamed[value.name] = fresh_name(self._name(node, index, renamed, roots), names)
        return replace(
            state,
            block=self._renamed(block, renamed),
            placements={renamed[name]: where for name, where in state.placements.items() if name in renamed},
            recomputed=frozenset(renamed[name] for name in state.recomputed & renamed.keys()),
            offloaded=frozenset(renamed[name] for name in state.offloaded & renamed.keys()),
            partitioned=frozenset((renamed[name], axis) for name, axis in state.partitioned if name in renamed),
        )

    @staticmethod
    def _name(node: Node, index: int, renamed: dict[str, str], roots: dict[str, str]) -> str:
        value = node.outputs[index]
        root = roots.get(value.name)
        if node.op == WAIT:
            return renamed[node.operands()[0]].removesuffix("_start")
        if root is not None:
            tail = value.name.removeprefix(root) if value.name.startswith(root) else "_" + value.name.rsplit("_", 1)[-1]
            return identifier(renamed[root] + TRAILING_NUMBER.sub("", tail))
        layer = layer_name(node)
        if layer is not None:
            return identifier(layer)
        return identifier(TRAILING_NUMBER.sub("", value.name) if len(node.outputs) == 1 else value.name)

    @staticmethod
    def _renamed(block: Block, renamed: dict[str, str]) -> Block:
        def value(old: Value) -> Value:
            return replace(old, name=renamed[old.name])

        nodes = tuple(
            replace(
                with_operands(node, [renamed[name] for name in node.operands()]),
                outputs=tuple(map(value, node.outputs)),
            )
            for node in block.nodes
        )
        return replace(
            block,
            inputs=tuple(map(value, block.inputs)),
            parameters=tuple(replace(parameter, value=value(parameter.value)) for parameter in block.parameters),
            nodes=nodes,
            outputs=tuple(renamed[name] for name in block.outputs),
            updates=tuple((renamed[buffer], renamed[name]) for buffer, name in block.updates),
        )
