"""The words of a plan that may stand in the text of a program: identifiers, strings in quotes, dtypes, sizes, operations,
comments.

A plan is data from anywhere. All text is written from what passes here and from `repr`, so that nothing of a plan is read as
code, and nobody has to read the text again. PlanError, one line, for anything else.
"""

from __future__ import annotations

import builtins
import json
import keyword
import re
from collections.abc import Collection, Iterable
from functools import cache
from typing import NoReturn

import torch

from autopar.errors import PlanError
from autopar.ir.dims import Dim
from autopar.ir.graph import DType, Node, leaves
from autopar.ir.names import DTYPES
from autopar.ir.regions import REGION_OPS, inner_nodes
from autopar.operations.table import operation
from autopar.passes.readable_names import RESERVED, identifier
from autopar.runtime.attribute_names import attribute_of as attribute_of
from autopar.runtime.errors import one_line

USED = RESERVED - set(dir(builtins)) | {"super", "zip", "range"}
"""Names that the text of a program reads. Inputs keep the user's names, which may be those of other builtins (``input``)."""
TORCH_ONLY = frozenset(("prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler", "inductor"))
"""Namespaces of torch that no captured model has."""
IMPORTED_NAMES = frozenset(
    ("BlockModule", "ParameterSpec", "Program", "Base", "BoundaryTensor", "ModelChunk", "Recompute", "C", "F", "Tensor", "nn")
    + ("torch",)
)
"""Names that must not clash with those of torch and of the runtime's base classes."""
_SIZE = re.compile(r"(?:B|B_all|\d+|//?|\*\*|[-+* ()])+", re.ASCII)
_CONVERSION = re.compile(r"[\w(),]+ -> [\w(),]+", re.ASCII)
_DIVISION = re.compile(r"(?<!/)/(?!/)")


def refuse(why: str) -> NoReturn:
    """PlanError: nothing was run."""
    raise PlanError(
        f"the program of this plan cannot be written: {why}; nothing of it was run. Plan the model again, and report this "
        "where the plan is your own"
    )


def check_identifiers(names: Iterable[str], taken: Collection[str] = RESERVED) -> None:
    """Refuses names that are no plain identifiers, or hide what the program uses."""
    for name in names:
        plain = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
        if not plain or (name.startswith("__") and name.endswith("__")):
            refuse(f"{name[:60]!r} is no name")
        if name in taken:
            refuse(f"{name} hides a name that the program uses")


def check_attributes(names: Iterable[str]) -> None:
    """Refuses names that are no attributes; those of parameters may have letters of any language."""
    for name in names:
        if not name.isidentifier() or keyword.iskeyword(name):
            refuse(f"{name[:60]!r} is no name")


def quoted(text: str) -> str:
    """A string literal in double quotes."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def comment(text: str) -> str:
    """Words of a comment, in one line."""
    return text if text.isprintable() else one_line(text)


def docstring(text: str) -> str:
    """Words of a docstring, which they cannot end."""
    return comment(text).replace('"', "'").replace("\\", "/")


def dtype_source(name: str) -> str:
    """``torch.float32``."""
    if name not in DTYPES:
        refuse(f"{name[:40]!r} is no dtype")
    return f"torch.{name}"


def size_source(dim: Dim, real: bool = False) -> str:
    """A size as Python writes it, or a `real` number that is computed of sizes. Sizes are whole numbers by construction, so a
    quotient is a floor division."""
    written = str(dim) if real else _DIVISION.sub("//", str(dim))
    if not _SIZE.fullmatch(written):
        refuse(f"{written[:40]!r} is no size")
    return f"float({written})" if real and "/" not in written else written


def check_node(node: Node) -> None:
    """Refuses an operation whose strings, where the text has them without quotes, are no names of what they stand for."""
    kwargs = dict(node.kwargs)
    check_identifiers(kwargs, ())
    axis, conversion = kwargs.get("axis"), kwargs.get("conversion")
    if isinstance(axis, str):
        check_identifiers([axis])
    if isinstance(conversion, str) and not _CONVERSION.fullmatch(conversion):
        refuse(f"{conversion[:40]!r} is no conversion")
    for dtype in (each.dtype for each in node.outputs):
        dtype_source(dtype)
    for leaf in leaves((*node.args, *kwargs.values())):
        if isinstance(leaf, DType):
            dtype_source(leaf.name)
    for inner in inner_nodes(node):
        if inner.op not in REGION_OPS and not (inner.op.startswith("aten.") and _is_torch_operation(inner.op, makes=True)):
            refuse(f"{node.op} has {inner.op[:60]} inside")


def registered_name(op: str) -> str:
    """``torch.ops.aten.name.overload``, of an operation that takes and gives tensors, and writes into nothing."""
    if not _is_torch_operation(op):
        refuse(f"it calls {op[:60]}, which is no operation of a model")
    return f"torch.ops.{op if op.count('.') > 1 else f'{op}.default'}"


@cache
def _is_torch_operation(op: str, makes: bool = False) -> bool:
    """Return whether this is an operation of torch; with `makes` it may also be a factory."""
    namespace, name, *overload = op.split(".")
    if namespace in TORCH_ONLY or len(overload) > 1:
        return False
    try:
        schema = getattr(getattr(getattr(torch.ops, namespace), name), overload[0] if overload else "default")._schema
    except (AttributeError, RuntimeError):
        return False
    if not isinstance(schema, torch.FunctionSchema):
        return False
    tensors = any("Tensor" in str(argument.type) for argument in schema.arguments) or (makes and operation(op).factory)
    return tensors and not schema.is_mutable and any("Tensor" in str(each.type) for each in schema.returns)


def class_names(blocks: Iterable[str]) -> dict[str, str]:
    """A class for each block: its name, unless the module imports that one."""
    return {name: f"Model{name}" if name in IMPORTED_NAMES else identifier(name) for name in blocks}
