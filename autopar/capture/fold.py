"""Folds repeated layers: the nodes of equal layers become one block under canonical names, with one call per layer.

Start with `fold`. Equal blocks have equal texts, which their hash compares: layers are runs of nodes of one module, so no search
for isomorphic subgraphs is needed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from autopar.capture.flat import FlatGraph, StateTensor, rename_operands
from autopar.capture.layers import Span, Spans, called_repeatedly, layer_lists, without_marks
from autopar.capture.tracing.trace import Traced
from autopar.errors import CaptureError
from autopar.ir.graph import Block, Call, Graph, Node, Parameter, Value
from autopar.ir.interface import Output
from autopar.ir.plan_file.fingerprint import graph_fingerprint
from autopar.operations.table import operation, operations


def fold(model: nn.Module, flat: FlatGraph, traced: Traced) -> Graph:
    """The graph of `flat` with equal layers folded."""
    blocks: dict[str, Block] = {}
    names_taken: dict[str, int] = {}
    calls: list[Call] = []
    graph_names = {value.name: value.name for value in flat.inputs}
    check_outputs(flat)
    shapes = BlockShapes(model, flat)
    spans = Spans(
        flat.nodes, layer_lists(model) | called_repeatedly(model, flat.nodes), lambda span: shapes.of(span).fingerprint
    ).chosen()
    given = set(graph_names.values())
    for index, span in enumerate(spans):
        shaped, prefix = shapes.of(span), without_marks(span.path)
        key = shaped.fingerprint
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
        calls.append(
            Call(
                blocks[key].name,
                prefix,
                tuple(graph_names[name] for name in shaped.inputs),
                tuple(graph_names[name] for name in shaped.outputs),
                shaped.parameters,
            )
        )
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


def check_outputs(flat: FlatGraph) -> None:
    """CaptureError for an output that no operation computes."""
    given = {value.name for value in flat.inputs} | {source.value.name for source in flat.state_tensors}
    for path, name in flat.outputs:
        if name in given:
            field = path.rpartition(":")[0] or "(the result)"
            raise CaptureError(
                f"output {field} is an input, a parameter or a buffer of the model itself: leave it out of outputs"
            )


def glue_name(index: int, total: int) -> str:
    if total == 1:
        return "Main"
    return "Prologue" if index == 0 else "Epilogue" if index == total - 1 else "Middle"


@dataclass(frozen=True, slots=True)
class FlatNames:
    """What the value names of a flat graph mean, looked up once for all blocks."""

    values: Mapping[str, Value]
    sources: Mapping[str, StateTensor]
    inputs: frozenset[str]
    buffers: Mapping[str, str]

    @staticmethod
    def of(flat: FlatGraph) -> FlatNames:
        return FlatNames(
            flat.values(),
            {source.value.name: source for source in flat.state_tensors},
            frozenset(value.name for value in flat.inputs),
            {source.name: source.value.name for source in flat.state_tensors if source.buffer},
        )


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
        self.model, self.flat, self.known = model, flat, FlatNames.of(flat)
        self._last_use = {name: index for index, node in enumerate(flat.nodes) for name in node.operands()}
        self._last_use |= dict.fromkeys(flat.results, len(flat.nodes))
        self._made: dict[tuple[str, int, int], CanonicalBlock] = {}

    def of(self, span: Span) -> CanonicalBlock:
        key = span.path, span.start, span.end
        if key not in self._made:
            nodes = tuple(replace(node, module=without_marks(node.module)) for node in self.flat.nodes[span.start : span.end])
            later = {value.name for node in nodes for value in node.outputs if self._last_use.get(value.name, -1) >= span.end}
            self._made[key] = canonical_block(without_marks(span.path), nodes, self.flat, self.known, later)
        return self._made[key]

    def class_of(self, path: str) -> str:
        return type(self.model.get_submodule(path)).__name__


def canonical_block(
    prefix: str, nodes: tuple[Node, ...], flat: FlatGraph, known: FlatNames, used_outside: set[str]
) -> CanonicalBlock:
    """The block of a layer, without a name: canonical names, relative module paths, parameters and inputs in the order of their
    first use."""
    values, sources, graph_inputs, buffer_values = known.values, known.sources, known.inputs, known.buffers
    inside = {value.name for node in nodes for value in node.outputs}
    updates = [(buffer_values[buffer], new) for buffer, new in flat.updates if new in inside]
    reads = [name for node in nodes for name in node.operands()] + [buffer for buffer, _ in updates]
    outside = [name for name in dict.fromkeys(reads) if name not in inside]
    inputs = tuple(name for name in outside if name not in sources)
    parameters = tuple(sources[name] for name in outside if name in sources)
    outputs = tuple(value.name for node in nodes for value in node.outputs if value.name in used_outside)
    returned, written = {flat.loss, *(name for _, name in flat.outputs)}, {new for _, new in flat.updates}
    outputs = tuple(output for output in outputs if output in returned or output not in written)
    if flat.loss in graph_inputs:
        outputs = (*outputs, flat.loss)
    if not outputs:  # a layer that only moves its running statistics: nothing reads what it returns
        outputs = tuple(value.name for node in nodes for value in node.outputs if value.name not in written)[-1:]
    names: dict[str, str] = {}
    taken: set[str] = set()

    def claim(flat_name: str, wanted: str) -> str:
        wanted = re.sub(r"\W", "_", wanted)
        candidate, number = wanted, 1
        while candidate in taken:
            number += 1
            candidate = f"{wanted}_{number}"
        taken.add(candidate)
        names[flat_name] = candidate
        return candidate

    paths = [relative(source.name, prefix) for source in parameters]
    for source, path in zip(parameters, paths, strict=True):
        claim(source.value.name, path)
    for flat_name in inputs:
        fallback = "hidden" if values[flat_name].differentiable else "shared"
        claim(flat_name, own_input(flat_name, prefix) if flat_name in graph_inputs else fallback)
    canonical = tuple(canonical_node(node, names, claim, prefix) for node in nodes)
    block = Block(
        name="",
        inputs=tuple(replace(values[flat_name], name=names[flat_name]) for flat_name in inputs),
        parameters=tuple(
            Parameter(replace(source.value, name=names[source.value.name]), path, source.trainable, source.buffer)
            for source, path in zip(parameters, paths, strict=True)
        ),
        nodes=canonical,
        outputs=tuple(names[flat_name] for flat_name in outputs),
        updates=tuple((names[buffer], names[new]) for buffer, new in updates),
    )
    text = str(replace(block, nodes=tuple(replace(node, source="") for node in block.nodes)))
    return CanonicalBlock(
        block, hashlib.sha256(text.encode()).hexdigest(), inputs, outputs, tuple(source.name for source in parameters)
    )


def own_input(name: str, prefix: str) -> str:
    """The name in a layer of an input of the graph; without the layer's index where it ends with that (a cache of each layer)."""
    stem, _, index = name.rpartition("_")
    return stem if stem and index.isdigit() and index == prefix.rpartition(".")[2] else name


def canonical_node(node: Node, names: dict[str, str], claim: object, prefix: str) -> Node:
    """A node with canonical names of its operands and results."""
    assert callable(claim)
    read = rename_operands(node, names)
    module = relative(node.module, prefix)
    leaf = next((part for part in reversed(module.split(".")) if part and not part.isdigit()), "")
    stem = node.op.split(".")[1].lstrip("_")
    record = operations().get(node.op)  # of this overload: names stand in saved plans
    if leaf and record is not None and record.named_after_module:
        stem = leaf
    elif operation(node.op).attention:
        stem = "attention"
    outputs = tuple(replace(value, name=claim(value.name, stem)) for value in node.outputs)
    return replace(read, outputs=outputs, module=module)


def relative(path: str, prefix: str) -> str:
    """`path` relative to `prefix`; a path outside of it stays as it is."""
    if prefix and (path == prefix or path.startswith(f"{prefix}.")):
        return path[len(prefix) + 1 :]
    return path
