"""The expression of a node, as the torch code that a person would write, or else as a call of its ATen name."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isinf, isnan

from autopar.ir.dims import BATCH
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol
from autopar.ir.regions import REGION_OPS, without_shapes
from autopar.operations.notation.spelling import OPERATORS, OperationCall
from autopar.operations.table import operation
from autopar.program.checks import check_node, dtype_source, registered_name, size_source

Names = Callable[[str], str]
"""The expression that reads each value, by its name."""

WHOLE_BATCH = "B_all"
"""The whole batch, where data ranks have uneven shards of it."""

FUNCTION_CALL = re.compile(r"((?:F|C|torch(?:\.ops\.\w+)?)(?:\.\w+)+)\(((?:[^()]|\([^()]*\)|\(\([^()]*\)[^()]*\))*)\)")
"""An expression that is one call of a module's function: its name and its arguments."""
METHOD_CALL = re.compile(r"([\w.]+)\.(\w+)\((.*)\)")
"""An expression that is one method call of a named tensor: the tensor, the method and its arguments."""
SYMBOLS = "|".join(map(re.escape, sorted(OPERATORS, key=len, reverse=True)))
INFIX_EXPRESSION = re.compile(rf"([\w.]+) ({SYMBOLS}) ([\w.]+|-?[\d.]+(?:e-?\d+)?)")
"""An expression of a named tensor, an operator, and a tensor or a number."""


def argument_source(arg: Arg, names: Names) -> str:
    """An argument as a Python expression."""
    if isinstance(arg, Ref):
        return names(arg.name)
    if isinstance(arg, Symbol):
        written = size_source(arg.dim, arg.real).replace("*", " * ").replace(" *  * ", "**")
        return written.replace(BATCH, WHOLE_BATCH) if arg.whole else written
    if isinstance(arg, DType):
        return dtype_source(arg.name)
    if isinstance(arg, tuple):
        items = [argument_source(item, names) for item in arg]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(arg, float) and (isinf(arg) or isnan(arg)):
        return f'float("{arg}")'
    return repr(arg)


def expression(node: Node, names: Names) -> str:
    """The expression of a node, the right-hand side of its line."""
    check_node(node)
    given = (*node.args[:2], *map(without_shapes, node.args[2:])) if node.op in REGION_OPS else node.args
    call = OperationCall(
        node,
        tuple(argument_source(arg, names) for arg in given),
        {name: argument_source(arg, names) for name, arg in node.kwargs},
    )
    spelling = operation(node.op).spelling
    return (spelling(call) if spelling is not None else None) or aten_call(call)


def recomputed_expression(node: Node, names: Names) -> str:
    """The right-hand side of a node that the backward recomputes: ``recompute(F.silu, gate)``,
    ``recompute(Tensor.view, x, 2, 3)``, ``recompute(torch.add, x, y)``, ``recompute(lambda x: x[:, 1:], x)``.

    All tensors are arguments: a tensor that a closure held would be saved for the backward.
    """
    written = expression(node, names)
    operands = tuple(dict.fromkeys(node.operands()))
    plain = FUNCTION_CALL.fullmatch(written)
    if plain is not None:
        return f"recompute({plain[1]}{', ' if plain[2] else ''}{plain[2]})"
    method = METHOD_CALL.fullmatch(written)
    if method is not None and operands and method[1] == names(operands[0]):
        return f"recompute(Tensor.{method[2]}, {method[1]}{', ' if method[3] else ''}{method[3]})"
    infix = INFIX_EXPRESSION.fullmatch(written)
    if infix is not None and infix[1] == names(operands[0]):
        return f"recompute(torch.{OPERATORS[infix[2]]}, {infix[1]}, {infix[3]})"
    body = expression(node, lambda name: name)
    arguments = "".join(f", {names(name)}" for name in operands)
    return f"recompute(lambda{' ' if operands else ''}{', '.join(operands)}: {body}{arguments})"


def aten_call(call: OperationCall) -> str:
    """``torch.ops.aten.name.overload(...)``."""
    return f"{registered_name(call.node.op)}({call.listed()})"
