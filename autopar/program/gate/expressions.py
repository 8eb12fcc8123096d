"""The right-hand side of an operation's line: its calls, names, attributes, strings and numbers are those of the node."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from autopar.ir.graph import Arg, Node, Symbol
from autopar.ir.plan_file.names import DTYPES
from autopar.ir.regions import REGION_OPS, inner_nodes
from autopar.operations.table import operation
from autopar.program.expressions import WHOLE_BATCH
from autopar.program.gate.reading import SIZE_OPERATORS, dotted, expect, refuse

KEYWORDS = frozenset(
    ("dtype", "device", "padding_idx", "activation", "layout", "capacity", "axis")
    + ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
)
CONTEXT = frozenset(("self.training", "self.mesh", "self.mesh.device"))
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=",
    ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip
TORCH_ONLY = frozenset(("prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler", "inductor"))
"""Namespaces of torch that no captured model has."""


@cache
def forms_of(op: str) -> frozenset[str]:
    """How an operation may be written: the forms of its spelling (see `Spelling`), and a call by its registered name."""
    words, record = op.split("."), operation(op)
    forms = {form.format(words[1]) for form in (record.spelling.forms if record.spelling else ())}
    if record.splits_backward:
        forms.add(f"self.split_backward.{words[1]}")
    if _is_torch_operation(op):
        forms.add(f"torch.ops.{'.'.join(words if len(words) > 2 else [*words, 'default'])}")
    return frozenset(forms)


def _is_torch_operation(op: str, makes: bool = False) -> bool:
    """Whether the operation may be called by its registered name: it takes and gives tensors, and writes into nothing. With
    `makes` it may also be one of the factories."""
    namespace, name, *overload = op.split(".")
    if namespace in TORCH_ONLY or len(overload) > 1:
        return False
    try:
        schema = getattr(getattr(getattr(torch.ops, namespace), name), overload[0] if overload else "default")._schema
    except (AttributeError, RuntimeError):
        return False
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments) or (makes and operation(op).factory)
    return tensors and not schema.is_mutable and any("Tensor" in str(each.type) for each in schema.returns)


def _leaves(arg: Arg) -> Iterator[Arg]:
    if isinstance(arg, tuple):
        for item in arg:
            yield from _leaves(item)
    else:
        yield arg


@dataclass(slots=True)
class NodeReader:
    """Reads the expression of one node.

    Attributes:
        written: how values may be written here: names, and ``self.attribute`` of parameters.
        read: what was read of them.
    """

    node: Node
    written: dict[str, str]
    read: set[str] = field(default_factory=set)
    forms: frozenset[str] = field(init=False)
    numbers: set[float] = field(init=False)
    texts: set[str] = field(init=False)
    symbolic: bool = field(init=False)
    sizes: set[str] = field(init=False)
    axis: str = field(init=False)

    def __post_init__(self) -> None:
        kwargs = dict(self.node.kwargs)
        leaves = [leaf for arg in (*self.node.args, *kwargs.values()) for leaf in _leaves(arg)]
        self.forms = forms_of(self.node.op)
        self.texts = {leaf for leaf in leaves if isinstance(leaf, str)}
        self.numbers = {abs(leaf) for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)}
        sizes = [str(leaf.dim) for leaf in leaves if isinstance(leaf, Symbol)]
        self.numbers |= {int(digits) for size in sizes for digits in re.findall(r"\d+", size)}
        self.symbolic = bool(sizes)
        self.sizes = {WHOLE_BATCH if leaf.whole else "B" for leaf in leaves if isinstance(leaf, Symbol)}
        self.axis = str(kwargs.get("axis", ""))

    def check(self, tree: ast.expr) -> None:
        """Refuses what the node does not say, and regions with anything but operations of ATen."""
        for inner in inner_nodes(self.node):
            plain = inner.op.startswith("aten.") and _is_torch_operation(inner.op, makes=True)
            expect(plain or inner.op in REGION_OPS, tree, f"{self.node.op} has {inner.op[:60]} inside")
        self._value(tree)
        operands = {self.written[name] for name in self.node.operands()}
        expect(self.read == operands, tree, f"{self.node.op} reads {', '.join(sorted(self.read ^ operands))[:80]}")

    def _value(self, tree: ast.expr) -> None:
        if isinstance(tree, ast.Constant):
            self._constant(tree)
        elif isinstance(tree, ast.Name | ast.Attribute):
            self._name(tree)
        elif isinstance(tree, ast.Call):
            self._call(tree)
        elif isinstance(tree, ast.Tuple):
            self._all(tree.elts)
        elif isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            self._value(tree.operand)
        elif isinstance(tree, ast.BinOp):
            self._operator(tree, tree.op)
            self._all((tree.left, tree.right))
        elif isinstance(tree, ast.Compare) and len(tree.ops) == 1:
            self._operator(tree, tree.ops[0])
            self._all((tree.left, tree.comparators[0]))
        elif isinstance(tree, ast.Subscript):
            expect("[]" in self.forms, tree, f"{self.node.op} is a subscript")
            self._all((tree.value, tree.slice))
        elif isinstance(tree, ast.Slice):
            self._all([each for each in (tree.lower, tree.upper, tree.step) if each is not None])
        else:
            refuse(tree, f"{self.node.op} is written with a {type(tree).__name__}")

    def _all(self, trees: list[ast.expr] | tuple[ast.expr, ...]) -> None:
        for tree in trees:
            self._value(tree)

    def _constant(self, tree: ast.Constant) -> None:
        value = tree.value
        if value is None or value is Ellipsis or isinstance(value, bool):
            return
        if isinstance(value, str):
            expect(value in self.texts, tree, f"{self.node.op} has the text {value[:40]!r}")
        elif isinstance(value, int | float):
            expect(value in self.numbers, tree, f"{self.node.op} has the number {str(value)[:40]}")
        else:
            refuse(tree, f"{self.node.op} has {str(value)[:40]}")

    def _name(self, tree: ast.Name | ast.Attribute) -> None:
        name = dotted(tree)
        if name is None:
            refuse(tree, f"{self.node.op} takes an attribute of an expression")
        if name in self.written.values():
            self.read.add(name)
            return
        dtype = name.startswith("torch.") and name.removeprefix("torch.") in DTYPES
        known = dtype or name in CONTEXT or (name == self.axis and name != "") or (name in self.sizes)
        expect(known, tree, f"{self.node.op} reads {name[:60]}")

    def _operator(self, tree: ast.expr, symbol: ast.AST) -> None:
        sized = self.symbolic and type(symbol) in SIZE_OPERATORS
        expect(sized or SYMBOLS.get(type(symbol)) in self.forms, tree, f"{self.node.op} has another operator")

    def _call(self, tree: ast.Call) -> None:
        name, args = dotted(tree.func), tree.args
        if name == "recompute" and args:
            self._function(args[0])
            args = args[1:]
        elif name == "float" and len(args) == 1 and isinstance(args[0], ast.Constant):
            expect(args[0].value in ("inf", "-inf", "nan") and not tree.keywords, tree, "float of something else")
            return
        elif name not in self.forms:
            if not isinstance(tree.func, ast.Attribute) or f".{tree.func.attr}" not in self.forms:
                refuse(tree, f"{self.node.op} calls {(name or ast.unparse(tree.func))[:60]}")
            self._value(tree.func.value)
        self._all(args)
        allowed = KEYWORDS | {key for key, _ in self.node.kwargs}
        for given in tree.keywords:
            expect(given.arg in allowed, tree, f"{self.node.op} has the argument {given.arg}")
            self._value(given.value)

    def _function(self, tree: ast.expr) -> None:
        """What ``recompute`` calls: a function, a method of Tensor, or a lambda of the node's tensors."""
        if isinstance(tree, ast.Lambda):
            names, given = list(dict.fromkeys(self.node.operands())), tree.args
            odd = given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults
            expect(not odd and [arg.arg for arg in given.args] == names, tree, "recompute has other arguments")
            NodeReader(self.node, {name: name for name in names}).check(tree.body)
            return
        name = dotted(tree) or ""
        expect(name in self.forms or name.removeprefix("Tensor") in self.forms, tree, f"{self.node.op} recomputes {name[:60]}")
