"""The way from a model to its graph: one export, flattened, normalized and folded. Sizes of inputs beside the batch may stay
symbols, which numbers replace when a length comes: one export for all lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind

from autopar.capture.bind import batch_of
from autopar.capture.convert import BatchIsDivided, flatten_program
from autopar.capture.flat import FlatGraph
from autopar.capture.float8 import with_float8_products
from autopar.capture.fold_layers import fold
from autopar.capture.normalize import normalize
from autopar.capture.normalize.batch_norm import LOCAL, LOCAL_MEAN
from autopar.capture.normalize.simplify import without_dropout
from autopar.capture.options import CaptureOptions
from autopar.capture.tracing.data.batch_questions import Question, batch_conditions
from autopar.capture.tracing.equal_layers import CannotOutline
from autopar.capture.tracing.trace import Traced, trace
from autopar.errors import CaptureError
from autopar.ir.batch_totals import FIXED_AT
from autopar.ir.graph import Graph

LEFT_OUT = "these checks of data are not made:"
LOSS_OUTSIDE = (
    "the loss is computed outside of the program: neither pipelines nor micro-batches (loss_fn= puts it into the program)"
)


class Export:
    """An exported model. `graph` is that of the example inputs; `graph_at` that of others, where it holds for them.

    `open_dims` are dimensions of inputs, by name, whose sizes stay symbols beside the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: CaptureOptions,
        open_dims: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        if options.batch_norm not in ("global", "local"):
            raise CaptureError(f"batch_norm={options.batch_norm!r} is not known: write global or local")
        self.model, self.options = model, options
        attempt = partial(trace, model, args, kwargs, options, open_dims)
        try:
            self._take(attempt(), open_dims)
        except CannotOutline:
            self._take(attempt(outlined=False), open_dims)
        except BatchIsDivided:
            self._take(attempt(outlined=False, fixed_batch=True), open_dims)
        if not self._answers():  # a batch of 1 was traced as 2
            self._take(attempt(outlined=False, fixed_batch=True), open_dims)

    def _answers(self, sizes: Mapping[sympy.Symbol, int] | None = None) -> bool:
        """Return whether the forward's questions about sizes have the answers of the trace: for these sizes, or the example's."""
        known = {**self.lengths, **(sizes or {})}
        return all(
            question.at({each: known.get(each, self.traced.batch) for each in question.asks.free_symbols}) == sympy.true
            for question in self.traced.questions
        )

    def _take(self, traced: Traced, open_dims: Mapping[str, tuple[int, ...]] | None) -> None:
        self.traced, self.lengths = _with_final_symbols(traced), _lengths(traced, open_dims) if open_dims else {}
        self.graph = self._graph(self.lengths, traced.batch)

    @property
    def is_open(self) -> bool:
        """Whether it may hold for other sizes: a batch or lengths stayed symbols."""
        return self.traced.symbolic or bool(self.lengths)

    def graph_at(self, tensors: Mapping[str, Tensor]) -> Graph | None:
        """The graph for inputs of these shapes, which are of the structure of the example inputs; None where the forward may do
        something else for them."""
        if not self.is_open:
            return None
        values = self._values(tensors)
        if values is None:
            return None
        traced = {symbol: size if symbol in self.lengths else max(size, 2) for symbol, size in values.items()}
        if not _allowed(self.traced, traced) or not self._answers(values):
            return None
        return self._graph({symbol: values[symbol] for symbol in self.lengths}, batch_of(tensors))

    def _values(self, tensors: Mapping[str, Tensor]) -> dict[sympy.Symbol, int] | None:
        """The value of each symbol in the shapes of the inputs. None where they contradict each other."""
        sizes = [
            (expression, size)
            for name, shape in input_shapes(self.traced).items()
            for expression, size in zip(shape, tensors[name].shape, strict=True)
        ]
        values = {expression: int(size) for expression, size in sizes if expression.is_Symbol}
        return values if all(expression.subs(values) == size for expression, size in sizes) else None

    def _graph(self, lengths: Mapping[sympy.Symbol, int], batch: int) -> Graph:
        conditions = batch_conditions(self.traced.questions, lengths, batch) if self.traced.symbolic else ()
        interface = replace(self.traced.interface, batch_conditions=conditions)
        traced = replace(self.traced, lengths=lengths, batch=batch, interface=interface)
        flat: FlatGraph = flatten_program(traced)
        flat = flat if self.options.dropout else without_dropout(flat)
        flat = replace(flat, notes=(*flat.notes, *traced.notes))
        if not traced.interface.has_loss:
            flat = replace(flat, notes=(*flat.notes, LOSS_OUTSIDE))
        if traced.fixed_at:
            flat = replace(flat, notes=(*flat.notes, f"{FIXED_AT} {traced.fixed_at}"))
        if traced.checks:
            flat = replace(flat, notes=(*flat.notes, f"{LEFT_OUT} {', '.join(traced.checks)}"))
        if dims := traced.interface.batch_dims:
            where = ", ".join(f"dimension {dim} of {name}" for name, dim in dims.items())
            flat = replace(flat, notes=(*flat.notes, f"the batch is {where} (batch_dim= says another)"))
        flat = normalize(flat)
        if any(node.op == LOCAL_MEAN for node in flat.nodes):
            flat = replace(flat, notes=(*flat.notes, LOCAL))
        graph = fold(self.model, flat, traced)
        return with_float8_products(graph) if self.options.float8 else graph


def input_shapes(traced: Traced) -> dict[str, tuple[sympy.Expr, ...]]:
    """The sizes of each input by name, as sympy expressions."""
    return {
        name: tuple(_expression(size) for size in node.meta["val"].shape)
        for name, node in zip(traced.input_names, _inputs(traced), strict=True)
    }


def _inputs(traced: Traced) -> list[fx.Node]:
    kinds = {spec.arg.name: spec.kind for spec in traced.program.graph_signature.input_specs}
    return [node for node in traced.program.graph.nodes if kinds.get(node.name) is InputKind.USER_INPUT]


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _lengths(traced: Traced, open_dims: Mapping[str, tuple[int, ...]]) -> dict[sympy.Symbol, int]:
    """The symbols of sizes that stayed open, with the sizes of the example. One that is also a batch stays the batch."""
    shapes = input_shapes(traced)
    closed = {
        symbol
        for name, shape in shapes.items()
        for dim, size in enumerate(shape)
        if dim not in open_dims.get(name, ())
        for symbol in size.free_symbols
    }
    values = [node.meta["val"] for node in _inputs(traced)]
    hints = {_expression(size): int(size.node.hint) for value in values for size in value.shape if isinstance(size, torch.SymInt)}
    opened = {symbol for name, dims in open_dims.items() for dim in dims for symbol in shapes[name][dim].free_symbols}
    return {symbol: hints[symbol] for symbol in opened - closed if symbol in hints}


def _environment(traced: Traced) -> Any:
    """Torch's record of the symbols of an export, and of what the forward asked about them."""
    sizes = (size for node in _inputs(traced) for size in node.meta["val"].shape)
    return next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))


def _with_final_symbols(traced: Traced) -> Traced:
    """Return an export whose questions name the symbols of its inputs: two sizes may turn out to be equal while it is traced."""
    if not traced.questions or not any(size.free_symbols for shape in input_shapes(traced).values() for size in shape):
        return replace(traced, questions=())
    known = _environment(traced).replacements
    questions = []
    for asks, answer in traced.questions:
        for _ in range(4):  # as in `_holds`
            asks = asks.subs(known)
        questions.append(Question(asks, answer))
    return replace(traced, questions=tuple(questions))


def _allowed(traced: Traced, values: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether every question that the forward asked about sizes has the same answer for these sizes."""
    environment = _environment(traced)
    known = {**environment.replacements, **values}
    for symbol, value in values.items():
        if not environment.var_to_range[symbol].lower <= value <= environment.var_to_range[symbol].upper:
            return False
    return all(_holds(guard.expr, known, values) for guard in environment.guards)


def _holds(expression: sympy.Expr, known: Mapping[sympy.Symbol, Any], values: Mapping[sympy.Symbol, int]) -> bool:
    for _ in range(4):  # a replacement may hold symbols that are replaced
        if not expression.free_symbols - values.keys():
            break
        expression = expression.subs(known)
    return bool(expression.subs(values) == sympy.true)
