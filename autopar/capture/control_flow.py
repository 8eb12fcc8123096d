"""Control flow of an exported program: ``torch.cond`` and ``while_loop``, whose branches become regions (`ir.regions`) of one
node; and loops of fixed length, ``torch._higher_order_ops.scan`` and ``map``, whose steps are written one after the other, so
that every operation inside has its own rule."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from autopar.capture.normalize.recurrent import is_fixed_recurrent
from autopar.capture.tracing.places import HOST_ARGUMENTS, is_assertion, reads_number, source_line
from autopar.errors import CaptureError
from autopar.ir.graph import Arg, Node, Ref, Symbol, Value
from autopar.ir.regions import REGION_OPS, Region, region_arg
from autopar.operations.views import RESHAPE, RESHAPES

CONTROL_FLOW = {op.removeprefix("ap."): op for op in REGION_OPS}
"""Higher-order operations of torch, and ours."""

ArgOf = Callable[[Any], Arg]
"""The argument of a graph for one of an exported program."""
ValueOf = Callable[[str, Tensor], Value]


def region_call(node: fx.Node, owner: torch.nn.Module, where: str, arg: ArgOf, value: ValueOf) -> tuple[Arg, ...]:
    """The arguments of the node for a call of ``cond`` or ``while_loop`` in a graph of `owner`. CaptureError, one line, for what
    cannot run inside of a branch."""
    given: tuple[Any, ...] = node.args
    first, second = (given[1], given[2]) if str(node.target) == "cond" else (given[0], given[1])
    rest: tuple[Any, ...] = given[3:] if str(node.target) == "cond" else given[2:]
    groups = [[arg(item) for item in group] for group in rest]
    operands = [item for group in groups for item in group]
    title = f"{where or 'the model'}: {'torch.' if str(node.target) == 'cond' else ''}{node.target}"
    if str(node.target) == "while_loop" and any(not isinstance(item, Ref) for item in groups[0]):
        raise CaptureError(f"{title} carries a number: make it a tensor (torch.zeros(()))")
    regions = [region_arg(_Region(getattr(owner, each.target), operands, title, arg, value).read()) for each in (first, second)]
    tensors = [tuple(item for item in group if isinstance(item, Ref)) for group in groups]
    if str(node.target) == "cond":
        predicate = arg(given[0])
        if not isinstance(predicate, Ref):
            raise CaptureError(f"{title} of a size: write a Python if, each branch is captured for the sizes that take it")
        return predicate, tensors[0], *regions
    return tensors[0], tensors[1] if len(tensors) > 1 else (), *regions


class _Region:
    """Reads a branch. Operands that are sizes are filled in."""

    def __init__(self, module: Any, operands: Sequence[Arg], title: str, arg: ArgOf, value: ValueOf) -> None:
        self.module, self.operands, self.title, self.outer, self.value = module, operands, title, arg, value
        self.arguments: dict[fx.Node, Arg] = {}
        self.several: dict[fx.Node, tuple[Arg, ...]] = {}
        self.nodes: list[Node] = []
        self.count = 0

    def read(self) -> Region:
        graph: fx.Graph = self.module.graph
        arguments: list[str] = []
        for node, operand in zip((each for each in graph.nodes if each.op == "placeholder"), self.operands, strict=True):
            if isinstance(operand, Ref):
                arguments.append(f"a{len(arguments)}")
                self.arguments[node] = Ref(arguments[-1])
            else:
                self.arguments[node] = operand
        for node in graph.nodes:
            if node.op == "call_function":
                self.call(node)
        output: Any = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
        results = [self.arg(item) for item in (output if isinstance(output, (tuple, list)) else (output,))]
        names = tuple(item.name for item in results if isinstance(item, Ref))
        if len(names) != len(results):
            raise CaptureError(f"{self.title} returns what is no tensor: return tensors")
        return Region(tuple(arguments), tuple(self.nodes), names)

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            if arg in self.arguments:
                return self.arguments[arg]
            if arg.op == "get_attr":
                raise CaptureError(f"{self.title} holds the tensor {arg.target}: pass it as an operand")
            return self.outer(arg)  # a size
        if isinstance(arg, (list, tuple)):
            return tuple(map(self.arg, arg))
        found = self.outer(arg)
        if isinstance(found, str) and found.startswith("%"):
            raise CaptureError(f"{self.title} has the text {found!r}: choose another")
        return found

    def call(self, node: fx.Node) -> None:
        target: Any = node.target
        if target is operator.getitem:
            self.arguments[node] = self.several[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        result, text = node.meta.get("val"), str(target)
        if reads_number(node):
            raise CaptureError(f"{self.title} reads a number of a tensor (.item()): leave it a tensor")
        tensors: Any = result if isinstance(result, (tuple, list)) else (result,)
        if is_assertion(node) or not all(isinstance(each, Tensor) for each in tensors):
            return
        if text in CONTROL_FLOW:
            args = region_call(node, self.module, self.title, self.arg, self.value)
            draft = Node(CONTROL_FLOW[text], args, (), ())
        else:
            draft = Node(*self.operation(node), ())
        outputs = []
        for tensor in tensors:
            outputs.append(self.value(f"v{self.count}", tensor))
            self.count += 1
        self.nodes.append(replace(draft, outputs=tuple(outputs)))
        names = tuple(Ref(value.name) for value in outputs)
        if isinstance(result, (tuple, list)):
            self.several[node] = names
        else:
            self.arguments[node] = names[0]

    def operation(self, node: fx.Node) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        target: Any = node.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
            raise CaptureError(f"{self.title}: {target} cannot be captured inside of a branch: move it outside")
        schema, overload = target._schema.name.replace("::", "."), target._overloadname
        op = schema if overload == "default" else f"{schema}.{overload}"
        if torch.Tag.nondeterministic_seeded in target.tags and not is_fixed_recurrent(op, node.args):
            raise CaptureError(f"{self.title}: {schema} draws random numbers inside of a branch: draw outside, and pass them in")
        args = tuple(map(self.arg, node.args))
        if schema in RESHAPES:
            return RESHAPE, (args[0], _one_open(args[1])), ()
        kwargs = tuple((key, self.arg(item)) for key, item in node.kwargs.items() if key not in HOST_ARGUMENTS)
        return op, args, kwargs


def _one_open(sizes: Arg) -> Arg:
    """Sizes of a view with -1 for the one that has the batch, so that it is right for a shard too."""
    found = sizes if isinstance(sizes, tuple) else ()
    if sum(isinstance(size, Symbol) for size in found) != 1 or -1 in found:
        return sizes
    return tuple(-1 if isinstance(size, Symbol) else size for size in found)


def results_read(node: fx.Node) -> tuple[int, ...]:
    """Return the numbers of the results of a call that are read: the counter of a loop may not be."""
    read = {int(user.args[1]) for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]
    return tuple(sorted(read)) or (0,)


def is_control_flow(target: object) -> bool:
    """Return whether an operation of an exported program is one of `CONTROL_FLOW`."""
    return not isinstance(target, torch._ops.OpOverload) and str(target) in CONTROL_FLOW


LOOPS = {"scan": "scan", "map_impl": "map"}
"""Operations of an exported program, and what users call them."""

MOST_NODES = 4096
"""Operations of all steps of one loop."""


def unroll_loops(program: ExportedProgram) -> None:
    """Writes out the loops of a program, in place. CaptureError, one line, where one is over the batch, or too long."""
    graph = program.graph_module.graph
    loops = [node for node in graph.nodes if node.op == "call_function" and str(node.target) in LOOPS]
    for node in loops:
        _unroll(program.graph_module, node)
    if loops:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _unroll(module: fx.GraphModule, node: fx.Node) -> None:
    """Replaces the results of one loop. Of a scan they are those that the last step carries, then what all steps give; steps are
    along dimension 0."""
    what, given = LOOPS[str(node.target)], list[Any](node.args)
    body: Any = getattr(module, given[0].target)
    carried, over, rest = ([], *given[1:3]) if what == "map" else given[1:4]
    length = over[0].meta["val"].shape[0]
    operations = sum(each.op == "call_function" for each in body.graph.nodes)
    where = source_line(node) or "the model"
    if not isinstance(length, int):
        remedy = "use torch.vmap" if what == "map" else "scan along another dimension"
        raise CaptureError(f"{where}: {what} along the batch cannot be captured: {remedy}")
    if length * operations > MOST_NODES:
        raise CaptureError(
            f"{where}: {what} of {length} steps of {operations} operations cannot be captured: write it as operations on whole "
            "tensors, or leave the smallest submodule around it whole: autopar.opaque(module)"
        )
    carried, given_out = list(carried), list[list[fx.Node]]()
    with module.graph.inserting_before(node):
        for step in range(length):
            parts = [_call(module, node, torch.ops.aten.select.int, (each, 0, step)) for each in over]
            results = _inlined(module, node, body, [*carried, *parts, *rest])
            carried, made = results[: len(carried)], results[len(carried) :]
            given_out.append(made)
        stacked = [_call(module, node, torch.ops.aten.stack.default, (list(each), 0)) for each in zip(*given_out, strict=True)]
    found = [*carried, *stacked]
    for user in list(node.users):
        user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]
        module.graph.erase_node(user)
    module.graph.erase_node(node)


def _inlined(module: fx.GraphModule, at: fx.Node, body: fx.GraphModule, operands: list[Any]) -> list[Any]:
    """One step: the results of a body's copy."""
    for node in body.graph.find_nodes(op="get_attr"):
        where = source_line(at) or "the model"
        raise CaptureError(f"{where}: the body of a loop holds the tensor {node.target}: pass it as an operand")
    copies: dict[fx.Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), operands, strict=True))
    results: Any = module.graph.graph_copy(body.graph, copies)
    for node, copied in copies.items():
        if node.op != "placeholder":
            copied.meta = _meta(at, node.meta.get("val"))
    return list(results)


def _call(module: fx.GraphModule, at: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    node = module.graph.call_function(target, args)
    values = fx.node.map_arg(args, lambda each: each.meta["val"])
    node.meta = _meta(at, target(*values))
    return node


def _meta(at: fx.Node, value: Any) -> dict[str, Any]:
    """Return the metadata of the place where the loop stands: the module and the line of what it is made of."""
    return {**at.meta, "val": value}
