"""Kinds of findings, each read from a captured graph: replicated operations, fixed sizes, matrix products in float32, equal
layers that are not folded."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from autopar.capture.layers import CONTAINERS
from autopar.ir.batch_totals import OPEN_BATCH, line_that_fixes, why_one_graph
from autopar.ir.graph import Block, Graph, Node
from autopar.operations.control_flow import OPAQUE
from autopar.operations.factories import CONSTANT
from autopar.operations.products import EINSUM
from autopar.operations.table import operation
from autopar.rules.expand import missing_rules
from autopar.rules.registry import Registry

KINDS = ("refused", "replicated", "fixed", "slow")
"""The kinds of findings, from the one that forbids a plan to those that make it slow."""

_LEAST_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding: `kind` is one of `KINDS`; `where` file, line and module, `count` the operations or layers that have it."""

    kind: str
    what: str
    where: str
    remedy: str
    count: int = 1


def place(graph: Graph, block: str, node: Node) -> str:
    """Return ``model.py:12 (layers.0.mlp)``, of the first call of a block."""
    prefix = next((call.prefix for call in graph.calls if call.block == block), "")
    module = ".".join(filter(None, (prefix, node.module)))
    return f"{node.source} ({module})" if node.source and module else node.source or module or "the model"


def _of_node(graph: Graph, block: Block, node: Node, kind: str, what: str, remedy: str) -> Finding:
    return Finding(kind, what, place(graph, block.name, node), remedy, graph.count(block.name))


def _nodes(graph: Graph) -> Iterator[tuple[Block, Node]]:
    return ((block, node) for block in graph.blocks for node in block.nodes)


def replicated_operations(graph: Graph, registry: Registry) -> Iterator[Finding]:
    """Operations without a sharding rule: every rank computes them whole."""
    for block in graph.blocks:
        for node in missing_rules(block, registry):
            if node.op == OPAQUE:
                what = f"the module {node.args[1]} is opaque"
                remedy = "batchwise=True, where examples do not depend on each other"
            else:
                what, remedy = f"{node.op} has no sharding rule", f'autopar.register_rule("{node.op}", "...")'
            yield _of_node(graph, block, node, "replicated", f"{what}: every rank computes it whole", remedy)


def fixed_sizes(graph: Graph, closed: Mapping[str, tuple[int, ...]]) -> Iterator[Finding]:
    """Sizes that hold for the example only. `closed` are the dimensions of inputs, by name, that could not stay open."""
    if not graph.batch_is_symbolic:
        yield Finding(
            "fixed", f"the batch is fixed at {graph.batch}: no micro-batches, no pipeline",
            line_that_fixes(graph).rsplit("/", 1)[-1] or "the model's forward",
            OPEN_BATCH,
        )  # fmt: skip
    for name, sizes in closed.items():
        shown = ", ".join(map(str, sizes))
        yield Finding(
            "fixed", f"dimension {shown} of input {name} is fixed at the example's size", "the model's forward",
            "nothing, where it never changes; else take it from x.shape (other lengths are captured anew)",
        )  # fmt: skip
    if reason := why_one_graph(graph):
        yield Finding(
            "fixed", f"{reason}: no pipeline, no micro-batches", "the model's result", "return the loss, or pass loss_fn="
        )


def constant_tensors(graph: Graph) -> Iterator[Finding]:
    """Tensors with values that are neither parameter nor buffer: they stand in the program, and train and move with nothing."""
    for block, node in _nodes(graph):
        if node.op == CONSTANT:
            shape = " x ".join(map(str, node.outputs[0].shape)) or "a scalar"
            what = f"a tensor of {shape} is neither parameter nor buffer: its values are those of now"
            yield _of_node(graph, block, node, "fixed", what, "nothing, where it never changes; else self.register_buffer(...)")


def slow_products(graph: Graph, compute: str) -> Iterator[Finding]:
    """Matrix products that do not run in the compute dtype."""
    if compute != "bfloat16":
        return
    for block, node in _nodes(graph):
        product = operation(node.op).flops is not None or node.op == EINSUM
        if product and node.outputs[0].dtype in ("float32", "float64"):
            what = f"{node.op} runs in {node.outputs[0].dtype} under bf16"
            remedy = "drop the .float() before it, or cast its operands to the weight's dtype"
            yield _of_node(graph, block, node, "slow", what, remedy)


def unfolded_layers(graph: Graph, model: nn.Module) -> Iterator[Finding]:
    """Equal layers that are no calls of one block: capture, search and program grow with their number."""
    blocks = {call.prefix: call.block for call in graph.calls if call.prefix}
    counts = Counter(call.block for call in graph.calls)
    for path, container in model.named_modules():
        if not isinstance(container, CONTAINERS):
            continue
        for kind, many in Counter(type(child) for child in container.children()).items():
            layers = [f"{path}.{name}" if path else name for name, child in container.named_children() if type(child) is kind]
            if many < _LEAST_LAYERS or not any(True for _ in next(c for c in container.children() if type(c) is kind).children()):
                continue
            folded = [layer for layer in layers if _inside(layer, blocks, counts)]
            if len(folded) < len(layers) - 1:
                yield Finding(
                    "slow", f"{len(layers) - len(folded)} of {len(layers)} layers {kind.__name__} are not folded into one block",
                    f"{source_of(kind)} ({path})", "make them equal: shapes, arguments, no branch on the layer's number", many,
                )  # fmt: skip


def _inside(layer: str, blocks: Mapping[str, str], counts: Mapping[str, int]) -> bool:
    """Return whether a layer is a call of a repeated block, or lies in one, or consists of some."""
    parts = layer.split(".")
    around = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    own = [blocks[path] for path in around if path in blocks]
    inner = [block for path, block in blocks.items() if path.startswith(f"{layer}.")]
    return any(counts[block] > 1 for block in (*own, *inner))


def source_of(kind: type) -> str:
    """Return ``file.py:line`` of a class."""
    try:
        file, line = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return kind.__name__
    return f"{file.rsplit('/', 1)[-1]}:{line}"


def lengths_of(tensors: Mapping[str, Tensor], batch: int) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of inputs that may be lengths: those behind the batch."""
    return {
        name: tuple(range(1, tensor.dim())) for name, tensor in tensors.items() if tensor.dim() > 1 and tensor.shape[0] == batch
    }
