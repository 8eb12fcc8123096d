"""Recovers the form of attention that export made dense: causal or no mask, sliding windows, documents, grouped query heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.capture.flat import FlatGraph, Lookup, Rewritten, node_like, node_rewrite, rewrite_nodes
from autopar.capture.normalize.documents import document_mask, document_operands
from autopar.capture.normalize.masks import WHOLE, Band, Conditions, MaskReader, conditions
from autopar.ir.graph import Arg, Node, Ref, Value
from autopar.operations.attention import DOCUMENTS

ATTENTION_ALONE = "documents of packed rows are kept apart in attention alone, as on one process:"
"""Begins the note of a graph in which other layers mix them."""
SDPA = "aten.scaled_dot_product_attention"
_AND = "aten.__and__.Tensor"
WINDOWED = "ap.attention"
"""Attention with a keyword argument `window` ``(left, right)``, -1 for unlimited; and with ``is_causal`` beside a mask."""


def full_arguments(node: Node) -> tuple[tuple[Arg, ...], dict[str, Arg]]:
    """(q, k, v, mask, dropout_p, is_causal) and the keyword arguments, defaults filled in."""
    defaults: tuple[tuple[str, Arg], ...] = (("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False))
    kwargs = dict(node.kwargs)
    args = list(node.args)
    for name, default in defaults[len(args) - 3 :]:
        args.append(kwargs.pop(name, default))
    return tuple(args), kwargs


def mask_recovery(flat: FlatGraph) -> FlatGraph:
    """Conditions of a mask that depend on sizes only become ``is_causal`` or a window, those of packed documents operands of
    attention within documents; others that depend on inputs stay a mask (see `masks`). A padding mask ``[B, 1, 1, T]`` is not
    expanded over the queries. Any other mask stays, with a note."""
    known, producers = flat.values(), flat.producers()
    reader, read = MaskReader(flat), dict[str, Conditions | None]()
    joins: dict[str, tuple[Node, ...]] = {}
    documents: dict[str, tuple[Arg, ...]] = {}
    windows: dict[str, dict[str, Arg]] = {}
    for node in flat.nodes:
        mask = full_arguments(node)[0][3] if node.op == SDPA else None
        if isinstance(mask, Ref) and mask.name not in read:
            found = read[mask.name] = conditions(reader, mask.name)
            form = document_mask(reader, mask.name)
            if form is not None:
                joins[mask.name], documents[mask.name] = document_operands(reader, producers[mask.name], form)
                windows[mask.name] = {} if form.window is None else {"window": (form.window, 0)}
            elif found is not None and len(found.others) > 1:
                joins[mask.name] = _joined(producers[mask.name], found.others, known)
    notes: dict[str, None] = {}

    def step(node: Node) -> Rewritten | None:
        if node.op != SDPA:
            return None if node.name not in joins else ((node, *joins[node.name]), {})
        args, kwargs = full_arguments(node)
        node, mask = replace(node, args=args, kwargs=tuple(kwargs.items())), args[3]
        if isinstance(mask, Ref) and mask.name in documents and _takes_documents(node, known):
            kwargs |= windows[mask.name]
            return replace(node, op=DOCUMENTS, args=(*args[:3], *documents[mask.name]), kwargs=tuple(kwargs.items()))
        found = read.get(mask.name) if isinstance(mask, Ref) else None
        if found is not None and isinstance(mask, Ref):
            left = (joins[mask.name][-1].name if mask.name in joins else found.others[0]) if found.others else None
            node = _banded(node, found.band, None if left is None else Ref(left), known)
        if isinstance(kept := node.args[3], Ref):
            notes[f"attention keeps an explicit mask {known[kept.name].shape}: no flash attention there"] = None
        return node

    flat = rewrite_nodes(flat, step)
    if place := _neighbours_mix(flat):
        notes[f"{ATTENTION_ALONE} a convolution over the tokens ({place}) reads those of the document before"] = None
    return replace(flat, notes=(*flat.notes, *notes))


def _neighbours_mix(flat: FlatGraph) -> str:
    """Return the line of a convolution over a sequence whose attention is within documents; empty where there is none. Recurrent
    layers of transformers have one, and carry their state over the ends of documents too."""
    known = flat.values()
    if not any(node.op == DOCUMENTS for node in flat.nodes):
        return ""
    weights = ((node, known[node.operands()[1]].shape) for node in flat.nodes if node.op in ("aten.conv1d", "aten.convolution"))
    return next((node.source for node, shape in weights if len(shape) == 3 and shape[-1] != 1), "")


def _takes_documents(node: Node, known: Mapping[str, Value]) -> bool:
    """Return whether attention has the form that documents have a function for: four dimensions, no dropout."""
    args, _ = full_arguments(node)
    return args[4] == 0.0 and all(len(known[arg.name].shape) == 4 for arg in args[:3] if isinstance(arg, Ref))


def _banded(node: Node, band: Band, mask: Ref | None, known: Mapping[str, Value]) -> Node:
    """The node with a band and what is left of its mask; the node itself where it has no such form."""
    (left, right), (args, kwargs) = band, full_arguments(node)
    q, k = (known[arg.name].shape for arg in args[:2] if isinstance(arg, Ref))
    plain = mask is None and left is None and right in (None, 0) and (right is None or q[-2] == k[-2])
    if not plain and band != WHOLE and (args[4] != 0.0 or len(q) != 4):
        return node
    if left is not None or (right or 0) > 0:
        kwargs |= {"window": (-1 if left is None else left, -1 if right is None else right)}
    op = SDPA if plain or band == WHOLE else WINDOWED
    return replace(node, op=op, args=(*args[:3], mask, args[4], right == 0), kwargs=tuple(kwargs.items()))


def _joined(mask: Node, names: Sequence[str], known: dict[str, Value]) -> tuple[Node, ...]:
    """The nodes, in the place of the mask, that compute the conjunction of conditions."""
    nodes: list[Node] = []
    last = names[0]
    for name in names[1:]:
        left, right = (known[each].shape for each in (last, name))
        rank = max(len(left), len(right))
        wide = [(1,) * (rank - len(shape)) + shape for shape in (left, right)]
        shape = tuple(y if x == 1 else x for x, y in zip(*wide, strict=True))
        nodes.append(node_like(mask, _AND, (Ref(last), Ref(name)), f"{mask.name}_data{len(nodes)}", shape, "bool", False))
        last = nodes[-1].name
        known[last] = nodes[-1].outputs[0]
    return tuple(nodes)


@node_rewrite
def grouped_heads(node: Node, graph: Lookup) -> Rewritten | None:
    """Keys and values that were repeated for each group of query heads become unrepeated operands, with ``enable_gqa``."""
    if node.op not in (SDPA, WINDOWED, DOCUMENTS):
        return None
    args, kwargs = (node.args, dict(node.kwargs)) if node.op == DOCUMENTS else full_arguments(node)
    assert isinstance(args[1], Ref) and isinstance(args[2], Ref)
    k, v = (_unrepeated(arg.name, graph, node.no_grad) for arg in args[1:3])  # type: ignore[union-attr]
    moved: list[Node] = []
    if k is None or v is None:
        k, v = (_unrepeated_rows(arg.name, graph, node.no_grad, moved) for arg in args[1:3])  # type: ignore[union-attr]
    if k is None or v is None or k.shape[1] != v.shape[1]:
        return None
    args = (args[0], Ref(k.name), Ref(v.name), *args[3:])
    return (*moved, replace(node, args=args, kwargs=tuple((kwargs | {"enable_gqa": True}).items()))), {}


def _unrepeated_rows(name: str, graph: Lookup, no_grad: bool, moved: list[Node]) -> Value | None:
    """The value of which each head is repeated before heads and rows change places, which they do in one of the nodes `moved`."""
    producer = graph.producers.get(name)
    if producer is None or producer.op != "aten.transpose.int" or {int(dim) % 4 for dim in producer.args[1:]} != {1, 2}:  # type: ignore[arg-type]
        return None
    source = _unrepeated(producer.operands()[0], graph, no_grad, heads=2)
    if source is None or producer.no_grad != no_grad:
        return None
    batch, rows, heads, width = source.shape
    moved.append(node_like(producer, producer.op, (Ref(source.name), 1, 2), f"{name}_heads", (batch, heads, rows, width)))
    return moved[-1].outputs[0]


def _unrepeated(name: str, graph: Lookup, no_grad: bool, heads: int = 1) -> Value | None:
    """The value of which each head is repeated, ``x[:, :, None].expand(...).reshape(...)``."""
    shape, chain = graph.values[name].shape, []
    for op in ("aten.reshape", "aten.expand", "aten.unsqueeze"):
        producer = graph.producers.get(name)
        if producer is None or producer.op != op or producer.no_grad != no_grad:
            return None
        chain.append(graph.values[name].shape)
        name = producer.operands()[0]
    source = graph.values[name].shape
    before, after = source[: heads + 1], source[heads + 1 :]
    if len(source) != 4 or len(chain[1]) != 5 or chain[2] != (*before, 1, *after):
        return None
    times = chain[1][heads + 1]
    expected = (*before[:-1], before[-1] * times, *after)  # type: ignore[operator]
    return graph.values[name] if shape == expected and chain[1] == (*before, times, *after) else None
