"""Blocks as text, one operation per line, for dumps, golden tests and error messages."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Block, DType, Node, Ref, Symbol, Value
from autopar.ir.placement import Placements, format_placements

Where = Mapping[str, Placements]


def format_arg(arg: Arg) -> str:
    """``%x``, ``<16*B>``, ``float32``, ``1e-05``, ``(1, 2)``."""
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Symbol):
        return f"<{arg.dim}>"
    if isinstance(arg, DType):
        return arg.name
    if isinstance(arg, tuple):
        return "(" + ", ".join(map(format_arg, arg)) + ")"
    return repr(arg)


def format_shape(shape: Shape) -> str:
    """``[B, 16, 8]``."""
    return "[" + ", ".join(map(str, shape)) + "]"


def format_value(value: Value, where: Where | None = None) -> str:
    """``%x: float32[B, 16] S(0) R``; a value with a gradient is marked ``'``."""
    placements = where.get(value.name) if where else None
    mark = "'" if value.differentiable else ""
    return f"%{value.name}: {value.dtype}{mark}{format_shape(value.shape)}" + (
        f" {format_placements(placements)}" if placements is not None else ""
    )


def format_node(node: Node, where: Where | None = None) -> str:
    """``%y: float32[B, 8] = aten.linear(%x, %w)``."""
    outputs = ", ".join(format_value(value, where) for value in node.outputs)
    args = ", ".join([*map(format_arg, node.args), *(f"{name}={format_arg(arg)}" for name, arg in node.kwargs)])
    return f"{outputs} = {node.op}({args})" + ("  no_grad" if node.no_grad else "")


def format_block(block: Block, where: Where | None = None) -> str:
    """The whole block; with the placements of `where`, if given."""
    lines = [f"block {block.name}("]
    lines += [f"    {format_value(value, where)}," for value in block.inputs]
    for parameter in block.parameters:
        kind = "buffer" if parameter.buffer else "parameter" if parameter.trainable else "frozen"
        lines.append(f"    {format_value(parameter.value, where)}  # {kind} {parameter.path}")
    lines.append("):")
    lines += [f"    {format_node(node, where)}" for node in block.nodes]
    lines += [f"    update %{buffer} = %{value}" for buffer, value in block.updates]
    lines.append("    return " + ", ".join(f"%{name}" for name in block.outputs))
    return "\n".join(lines) + "\n"
