"""The class attributes of a program, compared with the lowered program."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from autopar.ir import dims
from autopar.ir.graph import Value
from autopar.passes.lowered import Lowered
from autopar.program.gate.reading import check_identifiers, expect, is_name, literal, refuse, size_value


def check_attributes(tree: ast.stmt, found: dict[str, ast.expr], lowered: Lowered, totals: Sequence[str]) -> None:
    """Those of a program with and without a pipeline."""
    expected = {
        "mesh_axes": dict(lowered.axes),
        "input_placements": {name: dict(where) for name, where in lowered.input_placements},
        "input_dtypes": {value.name: value.dtype for value in lowered.inputs},
        "precision": (lowered.precision.compute, lowered.precision.master),
        "reduce_dtype": lowered.precision.reduce,
        "outputs": {each.path: dict(each.placements) for each in lowered.outputs},
        "output_kinds": {each.path: each.kind for each in lowered.outputs},
        "differentiable_inputs": tuple(value.name for value in lowered.inputs if value.differentiable),
        "totals": dict(zip(totals, lowered.total_ops, strict=True)) if totals else {},
        "micro_batches": lowered.micro_batches if lowered.micro_batches > 1 else 0,
        "zero_group": lowered.zero_group if 0 < lowered.zero_group < lowered.mesh.size_of("dp") else 0,
        "offload_optimizer": lowered.precision.offload_optimizer,
        **_interface(lowered),
    }
    if lowered.forward_only:
        expected["forward_only"] = True
    kept = {"mesh_axes", "precision"} | ({"positional"} if lowered.interface is not None else set())
    wanted = {key: value for key, value in expected.items() if value or key in kept}
    if lowered.interface is not None and not lowered.interface.has_loss:
        wanted["has_loss"] = False
    shapes = literal(found.pop("input_shapes")) if "input_shapes" in found else {}
    values = {key: literal(value) for key, value in found.items()}
    for key in sorted({*values, *wanted}):
        same = key in values and key in wanted and _equal(values[key], wanted[key])
        expect(same, found.get(key, tree), f"{key} is another one")
    _check_shapes(tree, shapes, lowered.inputs)


def _equal(found: Any, wanted: Any) -> bool:
    return type(found) is type(wanted) and found == wanted


def _interface(lowered: Lowered) -> dict[str, Any]:
    interface = lowered.interface
    if interface is None:
        return {}
    each = interface.arguments
    return {
        "positional": interface.positional,
        "arguments": {one.path: one.input for one in each if one.input and one.path != one.input},
        "constants": {one.path: one.constant for one in each if not one.input and not one.optional},
        "batch_dims": interface.batch_dims,
        "defaults": {one.path: one.constant for one in each if not one.input and one.optional},
    }


def _check_shapes(tree: ast.stmt, shapes: Any, inputs: Sequence[Value]) -> None:
    """Sizes of the inputs; None where any will do."""
    expect(isinstance(shapes, dict) and list(shapes) == [value.name for value in inputs], tree, "the shapes are of other inputs")
    for value in inputs:
        found = shapes[value.name]
        same = isinstance(found, tuple) and len(found) == len(value.shape)
        same = same and all(one is None or (type(one) is int and one == dim) for one, dim in zip(found, value.shape, strict=True))
        expect(same, tree, f"{value.name} has another shape")


def boundary_names(tree: ast.expr | None, received: Sequence[Sequence[Value]], batch: int) -> list[list[str]]:
    """The names of the tensors between chunks; shapes and dtypes are those of the values."""
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != len(received):
        refuse(tree, "the boundaries are others")
    return [_names_between(each, values, batch) for each, values in zip(tree.elts, received, strict=True)]


def _names_between(tree: ast.expr, values: Sequence[Value], batch: int) -> list[str]:
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != len(values):
        refuse(tree, "another number of tensors is sent")
    return [_boundary_name(each, value, batch) for each, value in zip(tree.elts, values, strict=True)]


def _boundary_name(tree: ast.expr, value: Value, batch: int) -> str:
    """``BoundaryTensor("x", lambda B: (B, 16), "float32")``."""
    if not isinstance(tree, ast.Call) or not is_name(tree.func, "BoundaryTensor") or len(tree.args) != 3:
        refuse(tree, "what is sent is no BoundaryTensor")
    name, shape, dtype = literal(tree.args[0]), tree.args[1], literal(tree.args[2])
    keywords = {str(given.arg): literal(given.value) for given in tree.keywords}
    if not isinstance(name, str) or dtype != value.dtype:
        refuse(tree, f"{value.name} is sent in another way")
    expect(keywords == ({} if value.differentiable else {"gradient": False}), tree, f"{value.name} has another gradient")
    check_identifiers([name])
    given = shape.args if isinstance(shape, ast.Lambda) else None
    if not isinstance(shape, ast.Lambda) or given is None or not isinstance(shape.body, ast.Tuple):
        refuse(tree, f"{value.name} has another shape")
    plain = len(given.args) == 1 and given.args[0].arg in ("B", "_") and not given.defaults and not given.kwonlyargs
    expect(plain and not given.vararg and not given.kwarg and not given.posonlyargs, tree, f"{value.name} has another shape")
    expect(len(shape.body.elts) == len(value.shape), tree, f"{value.name} has another shape")
    for each, dim in zip(shape.body.elts, value.shape, strict=True):
        same = size_value(each, {"B": batch}) == dims.size_at(dim, batch)
        expect(same and (isinstance(dim, str) or isinstance(each, ast.Constant)), tree, f"{value.name} has another shape")
    return name
