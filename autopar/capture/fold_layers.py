"""Folds repeated layers: the nodes of equal layers become one block under canonical names, with one call per layer.

Start with `fold`. Equal blocks have equal texts, which their hash compares: layers are runs of nodes of one module, so no search
for isomorphic subgraphs is needed. That only one of equal layers is traced: `tracing.equal_layers`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import nn

from autopar.capture.flat import FlatGraph, rename_operands
from autopar.capture.layers import Span, Spans, called_repeatedly, layer_lists, without_marks
from autopar.capture.tracing.trace import Traced
from autopar.ir.graph import Block, Call, Graph, Node, Parameter, batch_input, lacks_batch
from autopar.ir.interface import Output
from autopar.ir.plan_file.codec import graph_fingerprint
from autopar.operations.table import operation, operations


def fold(model: nn.Module, flat: FlatGraph, traced: Traced) -> Graph:
    """The graph of `flat` with equal layers folded."""
    layers = layer_lists(model) | called_repeatedly(model, flat.nodes)
    blocks: dict[tuple[str, bool], Block] = {}
    names_taken: dict[str, int] = {}
    calls: list[Call] = []
    graph_names = {value.name: value.name for value in flat.inputs}
    shapes = BlockShapes(model, flat)
    spans = Spans(flat.nodes, layers, lambda span: shapes.of(span).fingerprint).chosen()
    given = set(graph_names.values())
    for index, span in enumerate(spans):
        shaped, prefix = shapes.of(span), without_marks(span.path)
        key = shaped.fingerprint, flat.loss in shaped.outputs  # whole on every rank, unlike a sum that goes on to another call
        if key not in blocks:
            stem = shapes.class_of(prefix) if prefix else glue_name(index, len(spans))
            taken = names_taken.get(stem, 0)
            names_taken[stem] = taken + 1
            blocks[key] = replace(shaped.block, name=f"{stem}{taken + 1}" if taken else stem)
        stem = re.sub(r"\W", "_", prefix)
        for inner, outer in zip(blocks[key].outputs, shaped.outputs, strict=True):
            chosen = f"{stem}_{inner}" if stem else f"{blocks[key].name.lower()}_{inner}"
            while chosen in given and graph_names.get(outer) != chosen:
                chosen += "_"
            given.add(chosen)
            graph_names[outer] = chosen
        inputs, results = (tuple(graph_names[name] for name in names) for names in (shaped.inputs, shaped.outputs))
        calls.append(Call(blocks[key].name, prefix, inputs, results, shaped.parameters))
    outputs = tuple(Output(asked.rpartition(":")[0], graph_names[name], asked.rpartition(":")[2]) for asked, name in flat.outputs)
    graph = Graph(
        name=type(model).__name__,
        inputs=flat.inputs,
        blocks=tuple(blocks.values()),
        calls=tuple(calls),
        loss=graph_names[flat.loss],
        batch=traced.batch,
        fingerprint="",
        batch_is_symbolic=traced.symbolic,
        notes=flat.notes,
        outputs=outputs,
        interface=traced.interface,
    )
    return replace(graph, fingerprint=graph_fingerprint(graph))


def glue_name(index: int, total: int) -> str:
    if total == 1:
        return "Main"
    return "Prologue" if index == 0 else "Epilogue" if index == total - 1 else "Middle"


@dataclass(frozen=True, slots=True)
class CanonicalBlock:
    """The block of one layer, with the names in the flat graph of its inputs, outputs and parameters."""

    block: Block
    fingerprint: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]


class BlockShapes:
    """The canonical block of every span that is asked for, made once."""

    def __init__(self, model: nn.Module, flat: FlatGraph) -> None:
        self.model, self.flat, self.values = model, flat, flat.values()
        self.sources = {source.value.name: source for source in flat.state_tensors}
        self.inputs = {value.name for value in flat.inputs}
        self.buffers = {source.name: source.value.name for source in flat.state_tensors if source.buffer}
        self._last_use = {name: index for index, node in enumerate(flat.nodes) for name in node.operands()}
        self._last_use |= dict.fromkeys((flat.loss, *(name for _, name in flat.outputs)), len(flat.nodes))
        self._blocks: dict[tuple[str, int, int], CanonicalBlock] = {}

    def of(self, span: Span) -> CanonicalBlock:
        key = span.path, span.start, span.end
        if key not in self._blocks:
            nodes = tuple(replace(node, module=without_marks(node.module)) for node in self.flat.nodes[span.start : span.end])
            later = {value.name for node in nodes for value in node.outputs if self._last_use.get(value.name, -1) >= span.end}
            self._blocks[key] = self._canonical(without_marks(span.path), nodes, later)
        return self._blocks[key]

    def class_of(self, path: str) -> str:
        return type(self.model.get_submodule(path)).__name__

    def _canonical(self, prefix: str, nodes: tuple[Node, ...], used_outside: set[str]) -> CanonicalBlock:
        """The block of a layer, without a name: canonical names, relative module paths, parameters and inputs in the order of
        their first use."""
        flat, values = self.flat, self.values
        inside = dict.fromkeys(value.name for node in nodes for value in node.outputs)
        updates = [(self.buffers[buffer], new) for buffer, new in flat.updates if new in inside]
        reads = [name for node in nodes for name in node.operands()] + [buffer for buffer, _ in updates]
        outside = [name for name in dict.fromkeys(reads) if name not in inside]
        inputs = tuple(name for name in outside if name not in self.sources)
        if lacks_batch(nodes, [values[name] for name in inputs]):  # its text reads the number of examples from an input
            inputs += tuple(value.name for value in batch_input(flat.inputs))
        parameters = tuple(self.sources[name] for name in outside if name in self.sources)
        names = _CanonicalNames()
        paths = [relative(source.name, prefix) for source in parameters]
        for source, path in zip(parameters, paths, strict=True):
            names.claim(source.value.name, path)
        for name in inputs:
            fallback = "hidden" if values[name].differentiable else "shared"
            names.claim(name, own_input(name, prefix) if name in self.inputs else fallback)
        canonical = tuple(canonical_node(node, names, prefix) for node in nodes)
        outputs = self._outputs(inside, used_outside)
        block = Block(
            name="",
            inputs=tuple(replace(values[name], name=names.of[name]) for name in inputs),
            parameters=tuple(
                Parameter(replace(source.value, name=names.of[source.value.name]), path, source.trainable, source.buffer)
                for source, path in zip(parameters, paths, strict=True)
            ),
            nodes=canonical,
            outputs=tuple(names.of[name] for name in outputs),
            updates=tuple((names.of[buffer], names.of[new]) for buffer, new in updates),
        )
        text = str(replace(block, nodes=tuple(replace(node, source="") for node in block.nodes)))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return CanonicalBlock(block, digest, inputs, outputs, tuple(source.name for source in parameters))

    def _outputs(self, inside: Iterable[str], used_outside: set[str]) -> tuple[str, ...]:
        flat = self.flat
        written = {new for _, new in flat.updates}
        outputs = [name for name in inside if name in used_outside]
        if flat.loss in self.inputs:
            outputs.append(flat.loss)
        if not outputs:  # a layer that only moves its running statistics: nothing reads what it returns
            outputs = [name for name in inside if name not in written][-1:]
        return tuple(outputs)


class _CanonicalNames:
    """The names in a block, by those in the flat graph."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}
        self._used: set[str] = set()

    def claim(self, flat_name: str, wanted: str) -> str:
        wanted = re.sub(r"\W", "_", wanted)
        candidate, number = wanted, 1
        while candidate in self._used:
            number += 1
            candidate = f"{wanted}_{number}"
        self._used.add(candidate)
        self.of[flat_name] = candidate
        return candidate


def own_input(name: str, prefix: str) -> str:
    """The name in a layer of an input of the graph; without the layer's index where it ends with that (a cache of each layer)."""
    stem, _, index = name.rpartition("_")
    return stem if stem and index.isdigit() and index == prefix.rpartition(".")[2] else name


def canonical_node(node: Node, names: _CanonicalNames, prefix: str) -> Node:
    """A node with canonical names of its operands and results."""
    read = rename_operands(node, names.of)
    module = relative(node.module, prefix)
    leaf = next((part for part in reversed(module.split(".")) if part and not part.isdigit()), "")
    stem = node.op.split(".")[1].lstrip("_")
    record = operations().get(node.op)  # of this overload: names stand in saved plans
    if leaf and record is not None and record.named_after_module:
        stem = leaf
    elif operation(node.op).attention:
        stem = "attention"
    outputs = tuple(replace(value, name=names.claim(value.name, stem)) for value in node.outputs)
    return replace(read, outputs=outputs, module=module)


def relative(path: str, prefix: str) -> str:
    """`path` relative to `prefix`; a path outside of it stays as it is."""
    if prefix and (path == prefix or path.startswith(f"{prefix}.")):
        return path[len(prefix) + 1 :]
    return path
