"""The text of an operation in the program: as the torch code that a person would write."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.ir.graph import Node, Ref


@dataclass(frozen=True, slots=True)
class OperationCall:
    """A node with its arguments as source text."""

    node: Node
    args: tuple[str, ...]
    kwargs: dict[str, str]

    @property
    def packet(self) -> str:
        return self.node.op.split(".")[1]

    def has(self, index: int) -> bool:
        return len(self.args) > index and self.args[index] != "None"

    def listed(self, start: int = 0, **kwargs: str) -> str:
        """The arguments from `start` on, and the keyword arguments: those given here, those of the call, and `axis`, a mesh axis,
        as a variable of the forward."""
        axis = {"axis": str(dict(self.node.kwargs)["axis"])} if "axis" in self.kwargs else {}
        return ", ".join([*self.args[start:], *(f"{name}={text}" for name, text in (kwargs | self.kwargs | axis).items())])


Spelling = Callable[[OperationCall], str | None]
"""Writes the expression of a node; None where its arguments do not fit this form."""


OPERATORS = {
    "+": "add", "-": "sub", "*": "mul", "/": "div", "**": "pow", "%": "remainder", "==": "eq", "!=": "ne", "<": "lt", "<=": "le",
    ">": "gt", ">=": "ge", "&": "bitwise_and", "|": "bitwise_or", "^": "bitwise_xor",
}  # fmt: skip
"""The function of torch that an operator calls."""


def operand(text: str) -> str:
    """`text` as an operand: in parentheses unless it is simple."""
    simple = re.fullmatch(r"[\w.]+|-?[\d.]+(e-?\d+)?|[\w.]+\(.*\)", text) and not text.startswith("-")
    return text if simple else f"({text})"


def infix(symbol: str) -> Spelling:
    """``a + b``, ``a + 2 * b``."""

    def write(call: OperationCall) -> str | None:
        scale = call.kwargs.get("alpha") or (call.args[2] if len(call.args) > 2 else "1")
        if len(call.args) < 2 or set(call.kwargs) - {"alpha"} or (scale != "1" and symbol not in "+-"):
            return None
        a, b = (operand(text) for text in call.args[:2])
        return f"{a} {symbol} {b}" if scale == "1" else f"{a} {symbol} {operand(scale)} * {b}"

    return write


def method(call: OperationCall) -> str | None:
    """``x.sum(1)``."""
    first = call.node.args[0]
    return f"{operand(call.args[0])}.{call.packet}({call.listed(1)})" if isinstance(first, Ref) else None


def function(prefix: str) -> Spelling:
    """``torch.where(mask, x, y)``; of autopar's operations the function of that name in the runtime, ``C.linear_kn(x, w)``."""
    return lambda call: f"{prefix}.{call.packet}({call.listed()})"


def sizes_method(call: OperationCall) -> str | None:
    """``x.reshape(B, 16, 64)``."""
    sizes = call.args[1][1:-1].rstrip(",") if len(call.args) == 2 and isinstance(call.node.args[1], tuple) else ""
    return f"{operand(call.args[0])}.{call.packet}({sizes})" if sizes and not call.kwargs else None


def factory(call: OperationCall) -> str:
    """``torch.zeros((2, 3), dtype=torch.float32, device=self.mesh.device)``."""
    kwargs = {"dtype": f"torch.{call.node.outputs[0].dtype}"} | call.kwargs | {"device": "self.mesh.device"}
    return f"torch.{call.packet}({replace(call, kwargs=kwargs).listed()})"


def operator_factory(call: OperationCall) -> str:
    """``torch.ops.aten.fft_fftfreq(12, dtype=torch.float32, device=self.mesh.device)``: torch has it under another name, or warns
    of it."""
    return factory(call).replace("torch.", "torch.ops.aten.", 1)


def new_factory(call: OperationCall) -> str:
    """``x.new_zeros((2, 3), dtype=torch.float32)``."""
    return f"{operand(call.args[0])}.{call.packet}({call.listed(1, dtype=f'torch.{call.node.outputs[0].dtype}')})"


def softmax(call: OperationCall) -> str | None:
    """``x.softmax(-1)``, of ``_softmax(x, -1, False)``."""
    if len(call.args) < 2 or call.kwargs:
        return None
    wide = ", dtype=torch.float32" if len(call.args) > 2 and call.args[2] == "True" else ""
    return f"{operand(call.args[0])}.{call.packet.lstrip('_')}({call.args[1]}{wide})"


def plain(name: str) -> Spelling:
    """``F.layer_norm(x, (64,), weight, bias)``: the arguments that the function has too, without the flag of a kernel."""
    return lambda call: None if call.kwargs else f"{name}({', '.join(call.args[:5])})"
