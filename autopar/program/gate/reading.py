"""What all parts of the gate share: refusals, dotted names, literals, classes and functions."""

from __future__ import annotations

import ast
import builtins
import keyword
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from autopar.errors import PlanError
from autopar.ir.size_grammar import MOST_DEGREE
from autopar.passes.readable_names import RESERVED

LARGEST = 2**63
SIZE_OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: lambda a, b: int(a**b) if 0 <= b <= MOST_DEGREE else 0,
}


def refuse(node: ast.AST | None, why: str) -> NoReturn:
    """PlanError: nothing of the text was run."""
    line = getattr(node, "lineno", None)
    where = f", line {line}" if line else ""
    raise PlanError(
        f"the program's text is not what the plan lowers to{where}: {why}; nothing of it was run. Plan the model again, "
        "and report this where the plan is your own"
    )


def expect(holds: bool, node: ast.AST | None, why: str) -> None:
    """Refuses where it does not hold."""
    if not holds:
        refuse(node, why)


def dotted(node: ast.expr) -> str | None:
    """``torch.ops.aten.add``, where it is a name and attributes only."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def literal(node: ast.expr) -> Any:
    """The value of constants, tuples and dicts."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        refuse(node, "a literal is no literal")


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


USED = RESERVED - set(dir(builtins)) | {"super", "zip", "range"}
"""Names that the text of a program reads. Inputs keep the user's names, which may be those of other builtins (``input``)."""


def check_identifiers(names: Collection[str], taken: Collection[str] = RESERVED) -> None:
    """Refuses names that are no plain identifiers, or hide what the program uses."""
    for name in names:
        plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        expect(plain and not (name.startswith("__") and name.endswith("__")), None, f"{name[:60]!r} is no name")
        expect(name not in taken, None, f"{name} hides a name that the program uses")


def class_body(node: ast.stmt, name: str, base: str) -> tuple[dict[str, ast.expr], dict[str, ast.FunctionDef]]:
    """Assignments and methods of ``class name(base)``; it has nothing else but a docstring."""
    if not isinstance(node, ast.ClassDef) or node.name != name:
        refuse(node, f"the class {name} is missing")
    bases = len(node.bases) == 1 and is_name(node.bases[0], base)
    expect(bases and not node.keywords and not node.decorator_list, node, f"{name} is no class of {base} alone")
    attributes: dict[str, ast.expr] = {}
    methods: dict[str, ast.FunctionDef] = {}
    for each in without_docstring(node.body):
        if isinstance(each, ast.FunctionDef) and each.name not in methods:
            methods[each.name] = each
        elif isinstance(each, ast.Assign) and len(each.targets) == 1 and isinstance(each.targets[0], ast.Name):
            expect(each.targets[0].id not in attributes and not methods, each, f"{each.targets[0].id} is assigned again")
            attributes[each.targets[0].id] = each.value
        else:
            refuse(each, f"{name} has a statement that is no attribute and no method")
    return attributes, methods


def without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """The statements after a docstring, where there is one."""
    first = body[0] if body else None
    has = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    return body[1:] if has else body


def check_signature(node: ast.FunctionDef, arguments: Sequence[str]) -> None:
    """``def name(arguments)``, without defaults, annotations or decorators."""
    given = node.args
    plain = [arg for arg in given.args if arg.annotation is None]
    odd = given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults or given.kw_defaults
    expect(
        not odd and not node.decorator_list and node.returns is None and [arg.arg for arg in plain] == list(arguments),
        node,
        f"{node.name} does not take {', '.join(arguments)}",
    )


def size_value(node: ast.expr, names: Mapping[str, int], shapes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> int:
    """The value of an arithmetic of integers, `names`, and sizes of the inputs, ``x.shape[0]``."""
    if isinstance(node, ast.BinOp) and type(node.op) in SIZE_OPERATORS:
        a, b = size_value(node.left, names, shapes), size_value(node.right, names, shapes)
        divides = b != 0 or not isinstance(node.op, ast.FloorDiv)
        expect(abs(a) < LARGEST and abs(b) < LARGEST and divides, node, "a size has no value")
        return SIZE_OPERATORS[type(node.op)](a, b)
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
        shape, index = shapes.get(dotted(node.value.value) or "", ()), node.slice
        if isinstance(index, ast.Constant) and type(index.value) is int and 0 <= index.value < len(shape):
            return shape[index.value]
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    refuse(node, "a size is made of something else")
