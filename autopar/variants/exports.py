"""The graphs of calls: exported anew, or from the export of an earlier call that differs in its batch or lengths alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from autopar.capture.bind import batch_of, bind_inputs
from autopar.capture.export import Export
from autopar.capture.options import CaptureOptions
from autopar.errors import CaptureError
from autopar.ir.dims import Shape
from autopar.ir.graph import Graph
from autopar.runtime.plain.frozen_reads import Change
from autopar.runtime.step.arguments import argument_parts
from autopar.runtime.step.layouts import layout_of

MOST_EXPORTS = 16
"""Exports with a symbolic batch or lengths that are kept; the least recently used one goes first."""

Structure = tuple[Hashable, ...]


class Exports:
    """The exports of calls. `shapes` are those of the inputs of the first program, by name."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.sizes: dict[tuple[str, int], set[int | str]] = {
            (name, dim): {size} for name, shape in shapes.items() for dim, size in enumerate(shape)
        }
        self.exports: OrderedDict[tuple[Structure, int], Export] = OrderedDict()
        self.closed: set[Structure] = set()
        self.count = 0

    def graph(
        self,
        model: nn.Module,
        modes: tuple[bool, ...],
        arguments: Mapping[str, Any],
        options: CaptureOptions,
        changed: tuple[Change, ...] = (),
    ) -> Graph:
        """The graph of a call of the model, which is in these modes, with these attributes `changed`. A size that differed
        between calls stays a symbol."""
        bound = bind_inputs(model, (), arguments, loss_fn=options.loss_fn, batch_dim=options.batch_dim)
        layouts = [layout_of(x) if bound.keeps_layout else () for x in bound.tensors.values()]
        kinds = tuple((name, x.dtype, x.dim(), x.requires_grad) for name, x in bound.tensors.items())
        containers = tuple(argument_parts(name, value)[1] for name, value in arguments.items())
        trained = tuple(parameter.requires_grad for parameter in model.parameters())
        if not all(isinstance(leaf, Hashable) for leaf in bound.leaves):  # a constant that cannot be compared
            return Export(model, (), arguments, options).graph
        structure = (id(model), modes, changed, trained, kinds, *layouts, containers, bound.interface, bound.leaves, options)
        for key, export in reversed(self.exports.items()):
            if key[0] == structure and (graph := export.graph_at(bound.tensors)) is not None:
                self.exports.move_to_end(key)
                return graph
        dims = self._open(bound.tensors)
        if dims and structure not in self.closed:
            with suppress(CaptureError):
                export = Export(model, (), arguments, options, dims)
                if export.lengths:
                    return self._keep(structure, export)
            self.closed.add(structure)
        return self._keep(structure, Export(model, (), arguments, options))

    def _keep(self, structure: Structure, export: Export) -> Graph:
        """Return the graph of an export, and keep the export where it may hold for other calls."""
        if not export.is_open:
            return export.graph
        self.count += 1
        self.exports[structure, self.count] = export
        while len(self.exports) > MOST_EXPORTS:
            self.exports.popitem(last=False)
        return export.graph

    def _open(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """The dimensions of each input, beside the batch, that had several sizes by now."""
        found: dict[str, tuple[int, ...]] = {}
        batch = batch_of(tensors)
        for name, tensor in tensors.items():
            own = [(dim, int(size)) for dim, size in enumerate(tensor.shape) if dim or size != batch]
            for dim, size in own:
                self.sizes.setdefault((name, dim), set()).add(size)
            found[name] = tuple(dim for dim, _ in own if len(self.sizes[name, dim]) > 1)
        return {name: dims for name, dims in found.items() if dims}
