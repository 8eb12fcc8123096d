"""Takes recurrent nets with dropout between their layers apart: one operation for each layer, and ``ap.dropout`` between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.capture.flat import Lookup, Rewritten, node_like, node_rewrite
from autopar.ir.dims import Shape
from autopar.ir.graph import Arg, Node, Ref, Value

RECURRENT = {"aten.lstm.input": 2, "aten.gru.input": 1, "aten.rnn_tanh.input": 1, "aten.rnn_relu.input": 1}
"""How many states each operation has. Arguments: (input, states, parameters, has_biases, layers, dropout, train, bidirectional,
batch_first)."""


@node_rewrite
def layers_apart(node: Node, graph: Lookup) -> Rewritten | None:
    """Layers with dropout between them as operations of one layer each."""
    values = graph.values
    if node.op not in RECURRENT:
        return None
    layers, dropout, train = node.args[4:7]
    if not dropout or not train or layers == 1:
        return None
    return _apart(node, values)


def _apart(node: Node, values: Mapping[str, Value]) -> Rewritten:
    x, states, parameters, biases, layers, dropout, train, both, batch_first = node.args
    assert isinstance(parameters, tuple) and isinstance(layers, int) and isinstance(x, Ref)
    given = states if isinstance(states, tuple) else (states,)
    ways, out, per_layer = 2 if both else 1, node.outputs[0], len(parameters) // layers
    nodes: list[Node] = []
    last: list[list[Ref]] = [[] for _ in given]

    def add(op: str, args: tuple[Arg, ...], suffix: str, shape: Shape) -> Ref:
        nodes.append(node_like(node, op, args, f"{node.name}_{suffix}", shape))
        return Ref(nodes[-1].name)

    for layer in range(layers):
        own: list[Arg] = []
        for number, state in enumerate(given):
            assert isinstance(state, Ref)
            shape: Shape = (ways, *values[state.name].shape[1:])
            own.append(add("aten.slice.Tensor", (state, 0, layer * ways, (layer + 1) * ways), f"state{number}_{layer}", shape))
        stem = f"{node.name}_layer{layer}"
        shapes: list[Shape] = [out.shape, *((ways, *value.shape[1:]) for value in node.outputs[1:])]
        results = tuple(replace(out, name=f"{stem}_{index}", shape=shape) for index, shape in enumerate(shapes))
        held: Arg = tuple(own) if isinstance(states, tuple) else own[0]
        mine = parameters[layer * per_layer : (layer + 1) * per_layer]
        nodes.append(replace(node, args=(x, held, mine, biases, 1, 0.0, train, both, batch_first), outputs=results))
        x = Ref(results[0].name)
        for number, value in enumerate(results[1:]):
            last[number].append(Ref(value.name))
        if layer + 1 < layers:
            x = add("ap.dropout", (x, dropout), f"dropped{layer}", out.shape)
    names = {out.name: x.name}
    for number, (parts, value) in enumerate(zip(last, node.outputs[1:], strict=True)):
        names[value.name] = add("aten.cat", (tuple(parts), 0), f"last{number}", value.shape).name
    return tuple(nodes), names
