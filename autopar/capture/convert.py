"""Converts an exported program to a flat graph: sizes become ints or expressions in ``B``, getitem becomes several results."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.capture.constants import constant_node
from autopar.capture.control_flow import CONTROL_FLOW, is_control_flow, region_call, results_read
from autopar.capture.flat import FlatGraph, StateTensor
from autopar.capture.tracing.custom.functions import MARK, SEED
from autopar.capture.tracing.custom.linear import refuse_hidden, refuse_nonlinear
from autopar.capture.tracing.data.batch_questions import without_casts
from autopar.capture.tracing.equal_layers import NAMESPACE
from autopar.capture.tracing.explain_error import data_dependent, derivative_refused
from autopar.capture.tracing.fake_copy import has_no_data
from autopar.capture.tracing.guards import NO_GRAD_MARK, refuse_random
from autopar.capture.tracing.layer_span import LayerSpan
from autopar.capture.tracing.places import (
    HOST_ARGUMENTS,
    called_module_of,
    is_assertion,
    reads_number,
    source_line,
    source_place,
)
from autopar.capture.tracing.trace import Traced
from autopar.errors import CaptureError
from autopar.ir.dims import BATCH, Dim, Shape, as_dim, parse_size
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value, size_argument
from autopar.operations.factories import STRIDED
from autopar.operations.views import COMPLEX_VIEW, SLICE, SPLIT

_TENSOR_OVERLOADS = {"Tensor": "Tensor", "Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor"}
"""The overload that takes a tensor without dimensions in place of a number."""
_NO_GRADIENT = frozenset(
    ("detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones")
    + ("new_full", "new_empty", "argmax", "argmin", "floor_divide", "bernoulli", "one_hot", "histc")
)


def flatten_program(traced: Traced) -> FlatGraph:
    """The flat graph of a traced program."""
    return _Converter(traced).run()


class BatchIsDivided(CaptureError):
    """A size that the batch does not multiply (``x.chunk(2)``): the graph holds at the batch of the example only."""


class _Converter:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.values: dict[str, Value] = {}
        self.names: dict[fx.Node, str] = {}
        self.several: dict[fx.Node, tuple[str, ...]] = {}
        self.nodes: list[Node] = []
        self.spans: dict[str, LayerSpan] = {}
        self.current: fx.Node | None = None
        self.sources: dict[str, StateTensor] = {}
        self.copied: list[StateTensor] = []
        self.marked = False
        self.inputs = frozenset(traced.input_names)

    def run(self) -> FlatGraph:
        program = self.traced.program
        signature = program.graph_signature
        kinds = {spec.arg.name: spec for spec in signature.input_specs}
        state = {name: parameter for name, parameter in program.named_parameters()}
        inputs: list[Value] = []
        sources: list[StateTensor] = []
        user_names = iter(self.traced.input_names)
        for node in program.graph.nodes:
            if node.op == "placeholder":
                spec = kinds[node.name]
                self.names[node] = node.name
                if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    original = self.original(str(spec.target))
                    trainable = spec.kind is InputKind.PARAMETER and state[str(spec.target)].requires_grad
                    value = self.value(node.name, node.meta["val"], trainable and node.meta["val"].is_floating_point())
                    sources.append(StateTensor(value, original, trainable, spec.kind is InputKind.BUFFER))
                    self.sources[original] = sources[-1]
                elif spec.kind is InputKind.USER_INPUT:
                    self.names[node] = next(user_names)
                    inputs.append(self.value(self.names[node], node.meta["val"], self.names[node] in self.traced.differentiable))
                elif spec.kind is InputKind.CONSTANT_TENSOR:
                    self.constant(node, str(spec.target))
                else:
                    user = next(iter(node.users), node)
                    raise CaptureError(
                        f"{source_place(user) or 'the model'}: an object that is no tensor (a generator, a class of "
                        "torch.jit) cannot be captured: use torch's default random numbers, and plain Python"
                    )
            elif node.op == "call_function":
                self.call(node)
        mutated, returned = [], list[str]()
        output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
        for spec, result in zip(signature.output_specs, output.args[0], strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                returned.append(self.names[result])
            elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION):
                mutated.append((self.updated(str(spec.target), result), self.names[result]))
            else:
                raise CaptureError(f"the forward writes into its input {spec.target}: write into a clone of it")
        asked = self.traced.outputs
        if not self.values[returned[0]].differentiable:  # nothing trains: no gradient comes into an output
            asked = tuple(each.removesuffix(":gradient") + ":full" if each.endswith(":gradient") else each for each in asked)
        outputs = tuple(zip(asked, returned[1:], strict=True))
        every = (*sources, *self.copied)
        flat = FlatGraph(tuple(inputs), every, tuple(self.nodes), returned[0], tuple(mutated), outputs=outputs)
        for span in self.spans.values():
            span.check_outside(flat)
        flat = replace(flat, updates=self.all_updates(flat.updates))
        return refuse_nonlinear(flat) if self.marked else flat

    def all_updates(self, updates: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Add what copied layers write to their buffers; copies inside of a layer before those of that layer."""
        for span in sorted(self.spans.values(), key=lambda span: -span.path.count(".")):
            updates += tuple(span.copied_updates(updates))
        return updates

    def constant(self, node: fx.Node, target: str) -> None:
        """A tensor that is neither parameter nor buffer becomes an operation that makes it, with its values. CaptureError where
        they are unknown, or too many."""
        tensor = self.traced.program.constants.get(target)
        lifted = target.rpartition(".")[2].startswith("lifted_tensor_")
        user = next(iter(node.users), node)
        what = f"the tensor {self.original(target)}"
        what = f"a tensor made at {source_place(user) or 'a line of the forward'}" if lifted else what
        if not isinstance(tensor, torch.Tensor) or has_no_data(tensor):
            if self.traced.derivatives:
                raise derivative_refused(self.traced.derivatives)
            refuse_hidden(self.traced.program.graph, source_line(user))
            raise CaptureError(f"{what} is neither parameter nor buffer, and has no values (device meta): use register_buffer")
        made = constant_node(_real(tensor))
        if made is None:
            size = tensor.numel() * tensor.element_size()
            raise CaptureError(
                f"{what} is neither parameter nor buffer, and too large for a constant of the program ({size:,} bytes): "
                "use register_buffer(..., persistent=False)"
            )
        value = self.value(node.name, node.meta["val"], False)
        if not tensor.is_complex():
            kwargs = (("dtype", DType(value.dtype)),)
            self.nodes.append(Node(*made, kwargs, (value,), source=source_line(user)))
            return
        self.complex_constant(tensor, value)

    def own_name(self, node: fx.Node) -> str:
        """The name of what a node gives; export's own, unless an input has it (or begins with it, as names of results do)."""
        clashes = any(name == node.name or name.startswith(f"{node.name}_") for name in self.inputs)
        return f"{node.name}_of_graph" if clashes else node.name

    def updated(self, target: str, result: fx.Node) -> str:
        """The name of a buffer that the forward writes, with a result. CaptureError for a parameter."""
        name = self.original(target)
        if not self.sources[name].buffer:
            kind = "the optimizer trains" if self.sources[name].trainable else "is frozen"
            if "embedding_renorm" in str(result.target):
                raise CaptureError(
                    f"the forward writes to the parameter {name}, which {kind}: leave max_norm of its embedding out, and call "
                    "weight.renorm_(2, 0, max_norm), which takes all rows, after the optimizer's step, under torch.no_grad()"
                )
            raise CaptureError(
                f"the forward writes to the parameter {name}, which {kind}: make it a buffer (register_buffer), or update it "
                "outside of the forward, after the optimizer's step, under torch.no_grad()"
            )
        return name

    def original(self, target: str) -> str:
        name = target.removeprefix("module.")
        return self.traced.ties.get(name, name)

    def dim(self, size: Any) -> Dim:
        if isinstance(size, int):
            return size
        return as_dim(self.in_batch(size))

    def real(self, number: torch.SymFloat) -> Arg:
        """A float that is computed of sizes."""
        found = self.in_batch(number)
        if found.is_number:  # of lengths
            return float(found)
        text = str(sympy.expand(found))
        try:
            parse_size(text)
        except ValueError as error:
            raise BatchIsDivided(str(error)) from None
        return Symbol(text, real=True)

    def in_batch(self, size: Any) -> sympy.Expr:
        """A symbolic size as an expression in B. CaptureError where it depends on the data of a tensor."""
        where = source_place(self.current) if self.current is not None else ""
        if free_unbacked_symbols(size):
            raise CaptureError(data_dependent(where or "the model"))
        batch = sympy.Symbol(BATCH, integer=True, positive=True)
        expr = size.node.expr
        lengths = self.traced.lengths
        found = without_casts(expr).subs({symbol: lengths.get(symbol, batch) for symbol in expr.free_symbols})
        if not found.is_rational_function(batch):
            raise BatchIsDivided(
                f"{where or 'the model'}: the size {found} is no polynomial in the batch B; use sizes that the batch multiplies"
            )
        return found

    def new_value(self, name: str, tensor: torch.Tensor, differentiable: bool = False) -> Value:
        shape: Shape = tuple(self.dim(size) for size in tensor.shape)
        return Value(name, shape, str(tensor.dtype).removeprefix("torch."), differentiable)

    def value(self, name: str, tensor: torch.Tensor, differentiable: bool) -> Value:
        value = self.new_value(name, tensor, differentiable)
        self.values[name] = value
        return value

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            if arg in self.names:
                return Ref(self.names[arg])
            size = arg.meta.get("val")
            if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
                raise CaptureError(f"{source_line(arg)}: a value of type {type(size).__name__} cannot be captured")
            arg = size
        if isinstance(arg, torch.SymFloat):
            return self.real(arg)
        if isinstance(arg, (list, tuple)):
            return tuple(self.arg(item) for item in arg)
        if isinstance(arg, torch.dtype):
            return DType(str(arg).removeprefix("torch."))
        if isinstance(arg, torch.SymInt):
            return size_argument(self.dim(arg))
        if isinstance(arg, torch.SymBool):
            where = source_place(self.current) if self.current is not None else ""
            raise BatchIsDivided(f"{where or 'the model'}: the truth value of a size is an operand")
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        if isinstance(arg, (torch.device, torch.layout, torch.memory_format)):
            return None
        if isinstance(arg, complex) and self.current is not None:
            return self.complex_number(arg, self.current)
        where = source_place(self.current) if self.current is not None else ""
        raise CaptureError(
            f"{where or 'the model'}: an argument of type {type(arg).__name__} cannot be captured: use tensors and numbers"
        )

    def complex_number(self, number: complex, node: fx.Node) -> Arg:
        """A complex number of Python as a tensor without dimensions, since texts of programs have real numbers."""
        overload = getattr(node.target, "_overloadname", "")
        if overload not in _TENSOR_OVERLOADS:
            raise CaptureError(
                f"{source_place(node)}: {node.target} of the complex number {number}: write torch.tensor({number})"
            )
        dtype = node.meta["val"].dtype if node.meta["val"].dtype.is_complex else torch.complex128
        name = f"{self.own_name(node)}_complex{len(self.nodes)}"
        value = self.value(name, torch.empty((), dtype=dtype, device="meta"), False)
        self.complex_constant(torch.tensor(number, dtype=dtype), value)
        return Ref(name)

    def complex_constant(self, tensor: torch.Tensor, value: Value) -> None:
        """The operations that make a complex tensor of known values: its pairs of real numbers, and their view."""
        pair = _real(tensor)
        made = constant_node(pair)
        assert made is not None
        real = Value(f"{value.name}_pair", tuple(pair.shape), str(pair.dtype).removeprefix("torch."), False)
        self.nodes.append(Node(*made, (("dtype", DType(real.dtype)),), (real,)))
        self.nodes.append(Node(COMPLEX_VIEW, (Ref(real.name),), (), (value,)))

    def call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            of, index = node.args
            if of in self.several:
                self.names[node] = self.several[of][index]  # type: ignore[index]
            return
        self.current = node
        result = node.meta.get("val")
        target = str(node.target)
        if reads_number(node):
            raise CaptureError(data_dependent(source_place(node) or "the model"))
        if is_assertion(node):
            return
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(tensor, torch.Tensor) or tensor is None for tensor in tensors) or result is None:
            return  # a size: it is part of the values that use it
        if target == SPLIT and not isinstance(_cut_size(node), int):
            raise BatchIsDivided(f"{source_line(node)}: how many parts split() makes depends on the batch: use chunk(n)")
        branches = is_control_flow(node.target)
        if not branches and not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(f"{source_line(node)}: {target} cannot be captured")
        schema, overload = (CONTROL_FLOW[target], "default") if branches else name_of(node.target)
        if any(isinstance(arg, complex) for arg in node.args):
            overload = _TENSOR_OVERLOADS.get(overload, overload)
        op = schema if overload == "default" else f"{schema}.{overload}"
        self.marked |= schema == MARK
        if schema.startswith(f"{NAMESPACE}.") and schema not in (MARK, SEED):
            self.several[node] = self.layer(node)
            return
        if op == STRIDED:
            refuse_strides(node)
        refuse_random(op, node, source_line(node) or "the model")
        if branches:
            args = region_call(node, self.traced.program.graph_module, source_place(node), self.arg, self.new_value)
        else:
            args = tuple(self.arg(arg) for arg in node.args)
        if op == SLICE and args[2:3] == (None,):  # export writes 0 or None, by whether sizes are symbols
            args = (*args[:2], 0, *args[3:])
        kwargs = tuple((key, self.arg(arg)) for key, arg in node.kwargs.items() if key not in HOST_ARGUMENTS)
        read = results_read(node) if branches else tuple(range(len(tensors)))
        if len(read) < len(tensors):
            kwargs = (*kwargs, ("results", read))
        trace = (node.meta.get("custom") or {}).get(NO_GRAD_MARK)
        no_grad = trace is not None
        draft = Node(op, args, kwargs, ())
        flows = any(self.values[name].differentiable for name in draft.operands()) and not no_grad
        flows = flows and schema.partition(".")[2] not in _NO_GRADIENT
        own = self.own_name(node)
        names = tuple(f"{own}_{i}" if isinstance(result, (tuple, list)) else own for i in range(len(tensors)))
        outputs = tuple(
            self.value(name, tensor, flows and (tensor.is_floating_point() or tensor.is_complex()))
            for index, (name, tensor) in enumerate(zip(names, tensors, strict=True))
            if tensor is not None and index in read
        )
        if isinstance(result, (tuple, list)):
            self.several[node] = names
        else:
            self.names[node] = own
        self.nodes.append(Node(op, args, kwargs, outputs, called_module_of(node), source_line(node, trace), no_grad))

    def layer(self, node: fx.Node) -> tuple[str, ...]:
        """A marker of `outline`: the border of a traced layer, which is dropped; or an equal layer, which becomes a copy of
        it."""
        tensors: Any = node.args[0]
        operands = tuple(self.names[item] for item in tensors)
        kind, path, *feeding = str(node.args[-1]).split(" ")
        if kind == "enter":
            self.spans[path] = LayerSpan(path, operands, len(self.nodes))
        elif kind == "leave":
            span = self.spans[path]
            span.outputs, span.nodes = operands, tuple(self.nodes[span.start :])
            span.check_inside(self.sources)
        else:
            return self.copies(kind, path.split(","), operands, feeding)
        return operands

    def copies(self, kind: str, paths: Sequence[str], operands: tuple[str, ...], feeding: Sequence[str]) -> tuple[str, ...]:
        """Copies for a chain of layers (see `join_layers`): some arguments of each are results of the one before, others are the
        same for all."""
        fed = [tuple(map(int, pair.split("="))) for text in feeding for pair in text.split(",")]
        outputs: tuple[str, ...] = ()
        for number, path in enumerate(paths):
            given = list(operands)
            for argument, result in fed if number else ():
                given[argument] = outputs[result]
            copies, outputs, own = self.spans[kind].copy(path, tuple(given), self.values, self.sources)
            self.nodes += copies
            self.copied += own
            self.sources.update((source.name, source) for source in own)
            self.values.update((value.name, value) for copied in copies for value in copied.outputs)
        return outputs


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of real numbers: of a complex one the pairs."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def name_of(target: Any) -> tuple[str, str]:
    """``aten.add`` and ``Tensor`` of an operation of torch."""
    return target._schema.name.replace("::", "."), target._overloadname


def refuse_strides(node: fx.Node) -> None:
    """CaptureError for ``as_strided`` that reads another memory layout than that of a contiguous tensor."""
    x: Any = node.args[0]
    sizes: Any = node.args[1]
    strides: Any = node.args[2]
    offset: Any = node.args[3] if len(node.args) > 3 and node.args[3] is not None else 0
    tensor = x.meta["val"]
    numbers = (*sizes, *strides, offset, *tensor.shape)
    inside = not all(isinstance(each, int) for each in numbers) or (
        offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) < tensor.numel()
    )
    if not inside or not tensor.is_contiguous():
        raise CaptureError(f"{source_place(node)}: as_strided of a tensor that is not contiguous: use slices, or .contiguous()")


def _cut_size(node: fx.Node) -> int | torch.SymInt:
    """Return the size of the dimension that ``split(x, size, dim=0)`` cuts."""
    x: Any = node.args[0]
    dim: Any = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return x.meta["val"].shape[dim]  # type: ignore[no-any-return]
