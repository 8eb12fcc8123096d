"""Backwards of custom ``autograd.Function``s that are not linear in the gradient are refused.

A derivative that does not read the gradient g leaves three things open: what is added to g (``g + c``), steps, whose derivative
torch has as a constant (``sign(g)``), and values that have none (``g > 0``). They stand in the program of b(g) itself.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.capture.flat import FlatGraph, drop_dead, rename_operands
from autopar.capture.normalize.mathematics.linearity import factors, gives_zero, is_step, short_name, terms
from autopar.capture.tracing.custom.functions import ADDS, HIDDEN, MARK, NONLINEAR, SEED, refusal
from autopar.ir.graph import Arg, Node, Ref, Value
from autopar.operations.views import DETACH


def refuse_nonlinear(flat: FlatGraph) -> FlatGraph:
    """Return the graph without what is in it for this. CaptureError for the first function whose backward is not linear in the
    gradient."""
    plain = _without_marks(flat)
    for node in drop_dead(plain).nodes:
        if node.op == SEED:
            raise refusal(str(node.args[1]), f"{NONLINEAR} (it clips or scales by it)")
    walk = _Walk()
    for node in drop_dead(flat).nodes:
        walk.step(node)
    return plain


def refuse_hidden(graph: fx.Graph, line: str) -> None:
    """CaptureError for a tensor at the line of a custom function that export has no values of: torch made it for a derivative."""
    names = [str(node.args[1]) for node in graph.nodes if str(node.target).startswith(SEED)]
    for name in (name for name in names if name.rpartition(" ")[0].endswith(line)):
        raise refusal(name, HIDDEN)


def _without_marks(flat: FlatGraph) -> FlatGraph:
    """The graph without marks, and without detaches of what is made of detached tensors alone."""
    values, cut = flat.values(), set[str]()
    nodes, names = list[Node](), dict[str, str]()
    for node in (rename_operands(node, names) for node in flat.nodes):
        operands = node.operands()
        if node.op == MARK or (node.op == DETACH and operands[0] in cut):
            names[node.name] = operands[0]
            continue
        floating = {name for name in operands if _is_floating(values[name])}
        if node.op == DETACH or (floating and floating <= cut):
            cut.update(value.name for value in node.outputs)
        nodes.append(node)
    return replace(flat, nodes=tuple(nodes))


def _is_floating(value: Value) -> bool:
    return value.dtype.lstrip("b").startswith(("float", "complex"))


class _Walk:
    """The values that come from a gradient, with the names of their functions, and those that are zero."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.zeros: set[str] = set()
        self.floating: set[str] = set()

    def step(self, node: Node) -> None:
        outputs = {value.name for value in node.outputs}
        self.floating |= {value.name for value in node.outputs if _is_floating(value)}
        name = next((self.names[operand] for operand in node.operands() if operand in self.names), "")
        if node.op == SEED:
            self.names.update(dict.fromkeys(outputs, str(node.args[1])))
        elif name and node.op != MARK:
            self.check(node, name)
            self.names.update(dict.fromkeys(outputs, name))
        elif gives_zero(node, self.zeros):
            self.zeros |= outputs

    def check(self, node: Node, name: str) -> None:
        """CaptureError for an operation on a gradient that is not linear."""
        if is_step(node) or any(operand in self.names and operand not in self.floating for operand in node.operands()):
            raise refusal(name, f"{NONLINEAR} (aten.{short_name(node)} of it)")
        product = factors(node)
        if not all(map(self.vanishes, terms(node))) or (product and not any(map(self.vanishes, product))):
            raise refusal(name, ADDS)

    def vanishes(self, arg: Arg) -> bool:
        """Return whether an argument is zero where the gradient is."""
        if isinstance(arg, (tuple, list)):
            return all(map(self.vanishes, arg))
        if isinstance(arg, Ref):
            return arg.name in self.names or arg.name in self.zeros
        return arg is None or arg == 0
