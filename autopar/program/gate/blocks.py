"""The class of a block: its attributes, the specs of its parameters, and one statement per operation."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.ir import dims
from autopar.ir.graph import Node, Value, draws_masks
from autopar.operations.factories import RANDOM
from autopar.passes.lowered import Lowered, LoweredBlock
from autopar.program.block_source import BATCH_SIZES
from autopar.program.gate.expressions import NodeReader
from autopar.program.gate.reading import (
    check_identifiers,
    check_signature,
    class_body,
    dotted,
    expect,
    is_name,
    literal,
    refuse,
    size_value,
)
from autopar.program.names import attribute_of

Statement = tuple[ast.stmt, bool]
"""A statement, and whether it is under ``torch.no_grad()``."""


def check_block(tree: ast.stmt, name: str, lowered: Lowered, block: LoweredBlock) -> None:
    """The class of one block."""
    attributes, methods = class_body(tree, name, "BlockModule")
    nodes = block.block.nodes
    expected = {
        "zero": block.zero,
        "recompute": block.recompute,
        "selective_recompute": block.selective,
        "uses_rng": block.recompute and any(map(draws_masks, nodes)),
        "training_noise": any(node.op == RANDOM for node in nodes),
        "batch_statistics": bool(block.block.updates),
    }
    specs = attributes.pop("specs", None)
    found = {key: literal(value) for key, value in attributes.items()}
    expect(found == {k: v for k, v in expected.items() if v or k == "zero"}, tree, f"{name} has other attributes")
    _check_specs(specs, block)
    expect(list(methods) == ["forward"], tree, f"{name} has other methods")
    BlockReader(lowered, block).check(methods["forward"])


def _check_specs(tree: ast.expr | None, block: LoweredBlock) -> None:
    if not isinstance(tree, ast.Tuple) or len(tree.elts) != len(block.specs):
        refuse(tree, "the parameters are others")
    for each, spec in zip(tree.elts, block.specs, strict=True):
        if not isinstance(each, ast.Call) or not is_name(each.func, "ParameterSpec"):
            refuse(each, "a parameter is no ParameterSpec")
        keywords = {str(given.arg): literal(given.value) for given in each.keywords}
        marks = {"trainable": False} if not spec.trainable else {}
        same = [literal(arg) for arg in each.args] == [spec.path, spec.shape, spec.dtype, dict(spec.placements)]
        expect(same and keywords == marks | ({"buffer": True} if spec.buffer else {}), each, f"{spec.path} is another parameter")


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads the forward of a block, statement by statement."""

    lowered: Lowered
    lowered_block: LoweredBlock

    def check(self, forward: ast.FunctionDef) -> None:
        block = self.lowered_block.block
        inputs = [value.name for value in block.inputs]
        written = {name: name for name in [*inputs, *(value.name for node in block.nodes for value in node.outputs)]}
        check_identifiers([*written, *self.lowered.mesh.names])
        pairs = zip(block.parameters, self.lowered_block.specs, strict=True)
        written |= {parameter.value.name: f"self.{attribute_of(spec.path)}" for parameter, spec in pairs}
        check_signature(forward, ["self", *inputs])
        statements = _flat(self._after_header(forward.body))
        if self.lowered_block.selective:
            self._saved_elsewhere(statements, inputs)
        read = {name for node in block.nodes for name in node.operands()}
        read |= {*block.outputs, *(value for _, value in block.updates)}
        for node in block.nodes:
            self._node(next(statements, (forward, False)), node, written, read)
            self._saved_elsewhere(statements, [value.name for value in node.outputs])
        if block.updates:
            self._updates(next(statements, (forward, False))[0], written)
        _check_return(next(statements, (forward, False))[0], [written[name] for name in block.outputs])
        expect(next(statements, None) is None, forward, "there are statements after the return")

    def _after_header(self, body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
        """The statements after ``tp = self.mesh.tp`` and ``B = x.shape[0]`` (or one of `BATCH_SIZES`); those inside of
        ``with Recompute``."""
        axes = iter([axis for axis in self.lowered.mesh.names if axis in self._axes()])
        rest = list(body)
        while rest and isinstance(rest[0], ast.Assign) and len(rest[0].targets) == 1:
            first = rest[0]
            target = first.targets[0]
            if isinstance(target, ast.Name) and dotted(first.value) == f"self.mesh.{target.id}":
                expect(target.id == next(axes, ""), first, f"{target.id} is not the next mesh axis")
            elif self.lowered.uneven and isinstance(target, ast.Name) and target.id in BATCH_SIZES:
                expect(dotted(first.value) == BATCH_SIZES[target.id], first, f"{target.id} is another size")
            elif is_name(target, "B"):
                check_batch_size(first.value, self.lowered, self.lowered_block.block.inputs)
            else:
                break
            rest.pop(0)
        expect(next(axes, None) is None, body[0], "a mesh axis is missing")
        if not self.lowered_block.selective:
            return rest
        only = rest[0] if len(rest) == 1 else None
        if not isinstance(only, ast.With) or len(only.items) != 1:
            refuse(body[0], "the forward is not under Recompute")
        call, name = only.items[0].context_expr, only.items[0].optional_vars
        plain = isinstance(call, ast.Call) and is_name(call.func, "Recompute") and len(call.args) == 1 and not call.keywords
        same = plain and isinstance(call, ast.Call) and dotted(call.args[0]) == "self.mesh.host_memory"
        expect(same and name is not None and is_name(name, "recompute"), only, "Recompute is called with something else")
        return only.body

    def _axes(self) -> set[str]:
        used = {str(dict(node.kwargs)["axis"]) for node in self.lowered_block.block.nodes if "axis" in dict(node.kwargs)}
        return used | {axis for _, axis in self.lowered_block.partitioned}

    def _node(self, found: Statement, node: Node, written: dict[str, str], read: set[str]) -> None:
        tree, no_grad = found
        if not isinstance(tree, ast.Assign) or len(tree.targets) != 1:
            refuse(tree, f"{node.name} is not assigned")
        target = tree.targets[0]
        names = [value.name if value.name in read else "_" for value in node.outputs]
        got = [dotted(each) for each in target.elts] if isinstance(target, ast.Tuple) else [dotted(target)]
        expect(got == names and no_grad == node.no_grad, tree, f"{node.name} is assigned in another way")
        NodeReader(node, {name: written[name] for name in node.operands()}).check(tree.value)

    def _saved_elsewhere(self, statements: Iterator[Statement], names: Sequence[str]) -> None:
        """``recompute.offload(x)`` of those that are offloaded, ``recompute.partition(x, tp)`` of those saved in parts."""
        axes = dict(self.lowered_block.partitioned)
        for name in names:
            if name in self.lowered_block.offloaded:
                _check_call(next(statements, (None, False))[0], "recompute.offload", name)
            if name in axes:
                _check_call(next(statements, (None, False))[0], "recompute.partition", name, axes[name])

    def _updates(self, tree: ast.stmt, written: dict[str, str]) -> None:
        if not isinstance(tree, ast.If) or dotted(tree.test) != "self.training" or tree.orelse:
            refuse(tree, "buffers are written outside of training")
        statements = list(_flat(tree.body))
        updates = self.lowered_block.block.updates
        expect(len(statements) == len(updates) and all(quiet for _, quiet in statements), tree, "other buffers are written")
        for (each, _), (buffer, value) in zip(statements, updates, strict=True):
            _check_call(each, f"{written[buffer]}.copy_", written[value])


def check_batch_size(tree: ast.expr, lowered: Lowered, inputs: Sequence[Value]) -> None:
    """``x.shape[0] // 16``, which is B; or the batch of the plan."""
    for batch in (lowered.batch, 2 * lowered.batch):
        planned = isinstance(tree, ast.Constant) and not any(isinstance(dim, str) for value in inputs for dim in value.shape)
        shapes = {value.name: dims.shape_at(value.shape, batch) for value in inputs}
        expect(size_value(tree, {}, shapes) == (lowered.batch if planned else batch), tree, "B is another size")


def _check_call(tree: ast.stmt | None, function: str, *arguments: str) -> None:
    call = tree.value if isinstance(tree, ast.Expr) else None
    plain = isinstance(call, ast.Call) and not call.keywords
    same = plain and isinstance(call, ast.Call) and (dotted(call.func), *map(dotted, call.args)) == (function, *arguments)
    expect(same, tree, f"{function}({', '.join(arguments)}) is missing")


def _check_return(tree: ast.stmt, names: Sequence[str]) -> None:
    value = tree.value if isinstance(tree, ast.Return) else None
    got = [dotted(each) for each in value.elts] if isinstance(value, ast.Tuple) else [dotted(value)] if value else []
    expect(got == list(names), tree, "other values are returned")


def _flat(body: Sequence[ast.stmt], no_grad: bool = False) -> Iterator[Statement]:
    """The statements, those under ``with torch.no_grad():`` in their places."""
    for tree in body:
        if not isinstance(tree, ast.With):
            yield tree, no_grad
            continue
        call = tree.items[0].context_expr
        plain = isinstance(call, ast.Call) and dotted(call.func) == "torch.no_grad" and not call.args and not call.keywords
        expect(plain and len(tree.items) == 1 and tree.items[0].optional_vars is None and not no_grad, tree, "another `with`")
        yield from _flat(tree.body, True)
