"""Graphs of architectures: each *kind* of decoder is captured once, with primes as sizes; then sizes and depth are replaced.

A capture takes a second, and a table has a hundred pairs of model and sequence length. The operations of a decoder do not depend
on its sizes; so it is captured with a different large prime for every size, and each number of the graph that a prime divides is
that size (times the quotient). `tests/validate` proves that the result equals a capture of the model itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from autopar.decoders.decoder import Architecture
from autopar.decoders.modules import Decoder
from autopar.decoders.stored_graphs import stored_graph
from autopar.errors import CaptureError
from autopar.ir import dims
from autopar.ir.graph import Arg, Block, Call, Graph, Node, Symbol, Value, map_graph
from autopar.operations import products
from autopar.operations.attention import ATTENTION, PUBLISHED_CONTEXT
from autopar.operations.experts import PUBLISHED, PUBLISHED_FLOAT8
from autopar.operations.losses import CROSS_ENTROPY, PUBLISHED_IN_PLACE

_PRIMES = {
    **{"hidden": 1019, "ffn": 1021, "kv_heads": 1031, "head_dim": 1033, "vocab": 1013, "seq": 1009},
    **{"experts": 1039, "shared_ffn": 1049},
}
_TRACED_LAYERS = 3
"""The number of equal layers that are traced, beside the dense layers before them."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The changes of a run to the graph of the model. `float8`: matrix products of the layers are float8; `recompute_cast`: their
    operands are saved uncast, and the backward recomputes the cast. `context`: degree of context parallelism. `ep`: degree of
    expert parallelism; `once`: a token is sent to each node once; `recompute_activation`: the
    backward computes the experts' activation function again (Megatron's ``--recompute-modules moe_act``); `permuted`, `fused`,
    `ragged`: see `ExpertsCost`. `packed`: tokens of a
    sample where several are packed into a sequence, and each sees itself alone (0: a sequence is one sample)."""

    float8: bool = False
    recompute_cast: bool = False
    context: int = 1
    ep: int = 1
    once: bool = False
    recompute_activation: bool = False
    permuted: bool = False
    fused: bool = False
    ragged: bool = False
    packed: int = 0


@lru_cache(maxsize=512)
def graph_of(architecture: Architecture, layers: int, dtype: str, options: RunOptions) -> Graph:
    """The graph of the whole model in the compute dtype.

    With context parallelism a row of the batch is a chunk of a sequence: a sequence is `context` consecutive rows, and attention
    reaches over them. Context parallelism then shards rows, as data parallelism does.
    """
    architecture = replace(architecture, seq=architecture.seq // options.context)
    graph = deepen(sized(kind_of(architecture), architecture, dtype), layers)
    if architecture.experts:
        graph = with_experts(graph, options)
    if options.packed:
        graph = with_attention(graph, ATTENTION, "packed", options.packed)
    if options.context > 1:
        graph = with_attention(graph, PUBLISHED_CONTEXT, "parts", options.context)
    if architecture.loss_in_place:
        graph = _with_blocks(graph, lambda block: _with_nodes(block, _loss_in_place))
    return with_float8(graph, options.recompute_cast) if options.float8 else graph


def _with_blocks(graph: Graph, change: Callable[[Block], Block]) -> Graph:
    blocks = tuple(map(change, graph.blocks))
    return replace(graph, blocks=blocks, fingerprint=_fingerprint(blocks, graph.calls))


def _with_nodes(block: Block, change: Callable[[Node], Node]) -> Block:
    return replace(block, nodes=tuple(map(change, block.nodes)))


def _loss_in_place(node: Node) -> Node:
    return replace(node, op=PUBLISHED_IN_PLACE) if node.op == CROSS_ENTROPY else node


def with_attention(graph: Graph, op: str, key: str, number: int) -> Graph:
    """The graph with `op` for attention, and one more argument: ``ap.context_attention`` reaches over groups of `parts` rows of
    the batch; in a `packed` sequence each sample sees itself."""

    def node(item: Node) -> Node:
        return replace(item, op=op, kwargs=(*item.kwargs, (key, number))) if item.op == ATTENTION else item

    return _with_blocks(graph, lambda block: _with_nodes(block, node))


RECOMPUTED, OFFLOADED = "Recomputed", "Offloaded"


def with_marked_layers(graph: Graph, share: float, mark: str = RECOMPUTED) -> Graph:
    """The graph in which a `share` of the repeated layers, evenly spread, calls a block of its own, whose name ends in `mark`."""
    block = max(graph.blocks, key=lambda each: graph.count(each.name))
    places = [index for index, call in enumerate(graph.calls) if call.block == block.name]
    chosen = {place for number, place in enumerate(places) if int((number + 1) * share + 1e-9) > int(number * share + 1e-9)}
    if not chosen:
        return graph
    name = block.name + mark
    calls = tuple(replace(call, block=name) if index in chosen else call for index, call in enumerate(graph.calls))
    blocks = tuple(each for each in (*graph.blocks, replace(block, name=name)) if any(call.block == each.name for call in calls))
    return replace(graph, blocks=blocks, calls=calls, fingerprint=_fingerprint(blocks, calls))


def with_experts(graph: Graph, options: RunOptions) -> Graph:
    """The graph whose experts are sharded over `ep` neighbouring ranks, ``E / ep`` experts each. Their gradients are summed among
    the ranks that hold the same experts and over no mesh axis, so no gradient of them flows through a placement.
    """
    said = (
        ("ep", options.ep),
        ("once", options.once),
        *((name, True) for name in ("recompute_activation", "permuted", "fused", "ragged") if getattr(options, name)),
    )

    def block(item: Block) -> Block:
        weights = {name for node in item.nodes if node.op == PUBLISHED for name in node.operands()[2:4]}
        parameters = tuple(
            replace(each, value=replace(each.value, differentiable=False)) if each.value.name in weights else each
            for each in item.parameters
        )
        return _with_nodes(replace(item, parameters=parameters), node)

    def node(item: Node) -> Node:
        return replace(item, kwargs=(*item.kwargs, *said)) if item.op == PUBLISHED else item

    return _with_blocks(graph, block)


def with_float8(graph: Graph, recompute_cast: bool = False) -> Graph:
    """The graph whose linears in repeated blocks are ``ap.linear_float8``: bfloat16 operands and results, float8 inside."""

    def node(item: Node) -> Node:
        if item.op == PUBLISHED:
            return replace(item, op=PUBLISHED_FLOAT8)
        if item.op != products.LINEAR:
            return item
        kwargs = (*item.kwargs, ("recompute_cast", True)) if recompute_cast else item.kwargs
        return replace(item, op=products.PUBLISHED_FLOAT8, kwargs=kwargs)

    return _with_blocks(graph, lambda block: _with_nodes(block, node) if graph.count(block.name) > 1 else block)


def captured(architecture: Architecture, layers: int, dtype: str) -> Graph:
    """The capture of the model itself, without primes."""
    from autopar.capture import capture  # only here: a stored graph is priced without what capture imports

    with torch.device("meta"):
        model = Decoder(architecture, layers)
        tokens = torch.empty(2, architecture.seq, dtype=torch.long)
    return capture(model, (tokens, tokens), compute_dtype=dtype)


def kind_of(architecture: Architecture) -> Architecture:
    """The architecture with primes as sizes. One with latent attention has too many sizes and is its own kind."""
    if architecture.latent is not None:
        return architecture
    each = architecture.heads // architecture.kv_heads
    sizes = {name: prime for name, prime in _PRIMES.items() if getattr(architecture, name)}
    sizes |= {"head_dim": 2 * _PRIMES["head_dim"], "heads": each * _PRIMES["kv_heads"]}
    return replace(architecture, **sizes)  # type: ignore[arg-type]


@lru_cache(maxsize=64)
def _traced(kind: Architecture, dtype: str) -> Graph:
    stored = stored_graph(kind, dtype)
    return stored if stored is not None else traced(kind, dtype)


def traced(kind: Architecture, dtype: str) -> Graph:
    """The capture of a kind, few layers deep: what `stored_graphs` stores."""
    return captured(kind, kind.dense_layers + _TRACED_LAYERS, dtype)


@lru_cache(maxsize=256)
def sized(kind: Architecture, architecture: Architecture, dtype: str) -> Graph:
    """The graph of `kind` with the sizes of `architecture`, few layers deep. CaptureError where the head size is odd."""
    if architecture.head_dim % 2:
        raise CaptureError(f"a head of {architecture.head_dim} elements has no half to rotate: give an even head size")
    if kind == architecture:
        return _traced(kind, dtype)
    values = {_PRIMES[name]: getattr(architecture, name) for name in _PRIMES}
    values[_PRIMES["head_dim"]] = architecture.head_dim // 2
    return _mapped(_traced(kind, dtype), lambda number: _substituted(number, values))


def _substituted(number: int, sizes: Mapping[int, int]) -> int:
    for prime, size in sizes.items():
        while number and number % prime == 0 and abs(number) < 2**62:
            number = number // prime * size
            if size % prime == 0:
                break
    return number


def _mapped(graph: Graph, of: Callable[[int], int]) -> Graph:
    """The graph with `of` applied to every number."""

    def dim(size: dims.Dim) -> dims.Dim:
        if isinstance(size, int):
            return of(size)
        return dims.as_dim(dims.as_sympy(re.sub(r"\d+", lambda found: str(of(int(found[0]))), size)))

    def argument(item: Arg) -> Arg:
        if isinstance(item, Symbol):
            return replace(item, dim=dim(item.dim))
        return of(item) if type(item) is int else item

    def value(item: Value) -> Value:
        return replace(item, shape=tuple(map(dim, item.shape)))

    mapped = map_graph(graph, value, argument)
    return replace(mapped, fingerprint=_fingerprint(mapped.blocks, graph.calls))


def deepen(graph: Graph, layers: int) -> Graph:
    """`graph` with its repeated layer called more or less often, so that there are `layers` layers in all."""
    calls = [index for index, call in enumerate(graph.calls) if re.fullmatch(r".*\.\d+", call.prefix)]
    last = calls[-1]
    template, number = graph.calls[last], int(graph.calls[last].prefix.rpartition(".")[2])
    before, after = graph.calls[:last], graph.calls[last + 1 :]
    if layers < number + 1:
        first = calls[layers - 1]  # fewer than were traced: the first layers, and what follows reads the last of them
        renamed = dict(zip(template.outputs, graph.calls[first].outputs, strict=True))
        new = (*graph.calls[: first + 1], *(replace(c, inputs=tuple(renamed.get(n, n) for n in c.inputs)) for c in after))
        return replace(graph, calls=new, fingerprint=_fingerprint(graph.blocks, new))
    added: list[Call] = [template]
    for index in range(number + 1, layers):
        previous = added[-1]
        chained = dict(zip(graph.calls[calls[-2]].outputs, previous.outputs, strict=True))
        added.append(
            Call(
                template.block,
                _numbered(template.prefix, number, index, "."),
                tuple(chained.get(name, name) for name in template.inputs),
                tuple(_numbered(name, number, index, "_") for name in template.outputs),
                tuple(_numbered(name, number, index, ".") for name in template.parameters),
            )
        )
    renamed = dict(zip(template.outputs, added[-1].outputs, strict=True))
    rest = tuple(replace(call, inputs=tuple(renamed.get(name, name) for name in call.inputs)) for call in after)
    new = (*before, *added, *rest)
    return replace(graph, calls=new, fingerprint=_fingerprint(graph.blocks, new))


def _numbered(text: str, old: int, new: int, separator: str) -> str:
    """``layers.3.norm`` -> ``layers.17.norm``: the first number between separators."""
    mark = re.escape(separator)
    return re.sub(rf"{mark}{old}(?={mark}|$)", f"{separator}{new}", text, count=1)


def _fingerprint(blocks: tuple[Block, ...], calls: tuple[Call, ...]) -> str:
    return hashlib.sha256("\n".join((*map(str, blocks), *map(str, calls))).encode()).hexdigest()[:16]
