"""For tests of the solver: small graphs, plans by exhaustion, and what a plan sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from itertools import product
from random import Random

from support.blocks import Builder, llama_block

from autopar.cost_models.arcs import arc_cost
from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster, links_of_axis
from autopar.cost_models.state import group_of, optimizer_named, state_cost
from autopar.ir.graph import Block, Call, Graph, Ref, Value
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.placement import Invariant, Placements, Replicate, Shard, can_shard
from autopar.ir.plan import Candidate, NodePlan, Precision
from autopar.rules.conversions import arcs, changed_axis, conversion, states
from autopar.rules.expand import block_strategies, combine
from autopar.rules.registry import default_registry


def mesh_of(**axes: int) -> Mesh:
    return Mesh(tuple(Axis(name, size) for name, size in axes.items()))


def graph_of(blocks: tuple[Block, ...], order: tuple[str, ...], hidden: tuple[int | str, ...], batch: int, dtype: str) -> Graph:
    """Calls of one-input one-output blocks in a row; parameters are named after the call."""
    named = {block.name: block for block in blocks}
    calls = []
    for index, name in enumerate(order):
        out = "loss" if index == len(order) - 1 else f"h{index + 1}"
        parameters = tuple(f"c{index}.{parameter.path}" for parameter in named[name].parameters)
        calls.append(Call(name, f"c{index}", (f"h{index}",), (out,), parameters))
    return Graph("toy", (Value("h0", hidden, dtype, False),), blocks, tuple(calls), "loss", batch, "hand-written")


def llama_graph(layers: int = 2, batch: int = 32, seq: int = 8192, hidden: int = 4096, heads: int = 32, kv_heads: int = 8,
                ffn: int = 14336, dtype: str = "bfloat16") -> Graph:  # fmt: skip
    """A projection, Llama layers, and a sum."""
    layer = llama_block(hidden, heads, kv_heads, ffn, seq, dtype=dtype)
    full = ("B", seq, hidden)
    first = Builder("Prologue", dtype)
    x = first.input("features", ("B", seq, 64), differentiable=False)
    y = first.op("aten.linear", x, first.parameter("inner.weight", (hidden, 64)), shape=full, name="hidden")
    last = Builder("Epilogue", dtype)
    z = last.op("aten.linear", last.input("hidden", full), last.parameter("head.weight", (64, hidden)), shape=("B", seq, 64))
    end = last.block(last.op("aten.sum", z, shape=(), name="loss"))  # type: ignore[arg-type]
    calls = [Call("Prologue", "", ("features",), ("h0",), ("inner.weight",))]
    for i in range(layers):
        names = tuple(f"layers.{i}.{parameter.path}" for parameter in layer.parameters)
        calls.append(Call(layer.name, f"layers.{i}", (f"h{i}", "cos", "sin"), (f"h{i + 1}",), names))
    calls.append(Call("Epilogue", "", (f"h{layers}",), ("loss",), ("head.weight",)))
    angles = (1, seq, hidden // heads)
    inputs = (Value("features", ("B", seq, 64), dtype), Value("cos", angles, dtype), Value("sin", angles, dtype))
    return Graph("llama", inputs, (first.block(y), layer, end), tuple(calls), "loss", batch, "hand-written")  # type: ignore[arg-type]


def drawn_graph(seed: int, calls: int = 2) -> Graph:
    """A projection, two or three random operations as a repeated block, and a sum."""
    random = Random(seed)
    width, seq, dtype = random.choice((256, 512)), random.choice((128, 256)), "float32"
    full = ("B", seq, width)
    first = Builder("Prologue", dtype)
    x = first.input("x", full, differentiable=False)
    prologue = first.block(first.op("aten.linear", x, first.parameter("w.weight", (width, width)), shape=full, name="first"))  # type: ignore[arg-type]
    b = Builder("Middle", dtype)
    known: list[Ref] = [b.input("hidden", full)]
    for index in range(random.choice((1, 2))):
        op = random.choice(("aten.linear", "aten.silu", "aten.mul.Tensor", "aten.add.Tensor"))
        left, right = random.choice(known), random.choice(known)
        if op == "aten.linear":
            args: tuple[Ref, ...] = (left, b.parameter(f"w{index}.weight", (width, width)))
        else:
            args = (left,) if op == "aten.silu" else (left, right)
        known.append(b.op(op, *args, shape=full))  # type: ignore[arg-type]
    middle = b.block(known[-1])
    end = Builder("Epilogue", dtype)
    epilogue = end.block(end.op("aten.sum", end.input("hidden", full), shape=(), name="loss"))  # type: ignore[arg-type]
    return graph_of((prologue, middle, epilogue), ("Prologue", *["Middle"] * calls, "Epilogue"), full, 4, dtype)


class Exhaustion:
    """The least seconds over all strategies, boundaries and storages, without a data axis (``dp=1``): every conversion tree is an
    exact Steiner arborescence over all legal arcs. Shares prices with the solver, and no other code."""

    def __init__(self, graph: Graph, mesh: Mesh, cluster: Cluster, precision: Precision) -> None:
        self.graph, self.mesh, self.cluster, self.precision = graph, mesh, cluster, precision
        self.costs = {block.name: BlockCosts(block, mesh, graph.batch, cluster) for block in graph.blocks}
        self.steiner = lru_cache(maxsize=None)(self._steiner)

    def best_seconds(self) -> float:
        """Blocks in a row share the placements between them; so: the least over placements of the chain's only boundary class."""
        hidden = self.graph.block("Middle").inputs[0]
        options = [Invariant(), Replicate(), *(Shard(dim) for dim in range(1, len(hidden.shape)))]
        sizes = self.mesh.sizes
        ends = [at for at in product([Shard(0)], *[options] * (len(sizes) - 1)) if can_shard(hidden.shape, at, sizes)]
        whole = (Shard(0), *[Replicate()] * (len(sizes) - 1))
        loss = (Invariant(),) * len(sizes)
        calls = self.graph.count("Middle")
        return min(
            self._block("Prologue", whole, at) + calls * self._block("Middle", at, at) + self._block("Epilogue", at, loss)
            for at in ends
        )

    def _plans(self, name: str) -> list[list[NodePlan]]:
        block, values = self.graph.block(name), self.graph.block(name).values()
        per_axis = [
            block_strategies(block, size, batch_axis=axis == 0, batch_is_symbolic=True, registry=default_registry())
            for axis, size in enumerate(self.mesh.sizes)
        ]
        out = []
        for node in block.nodes:
            data = [s for s in per_axis[0][node.name] if Shard(0) in (*s.operands, *s.results)]
            out.append(list(combine([data, *(axis[node.name] for axis in per_axis[1:])], node, values, self.mesh.sizes)))
        return out

    def _block(self, name: str, start: Placements, end: Placements) -> float:
        block, costs = self.graph.block(name), self.costs[name]
        plans = self._plans(name)
        seconds = [[costs.node(plan).seconds for plan in each] for each in plans]
        return min(
            sum(spent[i] for spent, i in zip(seconds, chosen, strict=True))
            + self._conversions(block, [each[i] for each, i in zip(plans, chosen, strict=True)], start, end)
            for chosen in product(*[range(len(each)) for each in plans])
        )

    def _conversions(self, block: Block, plans: list[NodePlan], start: Placements, end: Placements) -> float:
        produced: dict[str, Placements] = {block.inputs[0].name: start}
        needs: dict[str, set[Placements]] = {block.outputs[0]: {end}}
        for node, plan in zip(block.nodes, plans, strict=True):
            for name, at in zip(node.operands(), plan.operands, strict=True):
                needs.setdefault(name, set()).add(at)
            produced.update((value.name, at) for value, at in zip(node.outputs, plan.results, strict=True))
        values, total = block.values(), 0.0
        for parameter in block.parameters:
            options = [Invariant(), Shard(0), Shard(1)]
            total += min(
                self.steiner(parameter.value, (Replicate(), *at), frozenset(needs[parameter.value.name]))
                + self._update(block, parameter.value.name, (Replicate(), *at))
                for at in product(*[options] * (len(self.mesh.sizes) - 1))
                if can_shard(parameter.value.shape, (Replicate(), *at), self.mesh.sizes)
            )
        for name, source in produced.items():
            total += self.steiner(values[name], source, frozenset(needs.get(name, ())))
        return total

    def _update(self, block: Block, name: str, at: Placements) -> float:
        parameter = next(each for each in block.parameters if each.value.name == name)
        group = group_of([(parameter, at)], self.mesh)
        link = links_of_axis(self.cluster, self.mesh, 0)
        return state_cost(group, 0, link, self.cluster.device, self.precision, optimizer_named("adamw")).optimizer_seconds

    def _steiner(self, value: Value, source: Placements, needs: frozenset[Placements]) -> float:
        """Dreyfus and Wagner (1971) on the directed graph of all legal conversions."""
        whole = (source[0], *[Replicate()] * (len(source) - 1))
        among = states(value.shape, (source, *needs, whole), self.mesh.sizes, value.differentiable)
        weight: dict[Placements, list[tuple[Placements, float]]] = {at: [] for at in among}
        for a, b in arcs(value.shape, among, self.mesh.sizes, value.differentiable):
            cost = arc_cost(value, a, b, self.mesh, self.graph.batch, self.cluster)
            weight[a].append((b, cost.forward_seconds + cost.backward_seconds))
        ends = sorted(needs, key=str)
        best: dict[tuple[int, Placements], float] = {}
        for mask in range(1, 1 << len(ends)):
            for at in among:
                if mask & (mask - 1) == 0:
                    best[mask, at] = 0.0 if at == ends[mask.bit_length() - 1] else float("inf")
                else:
                    splits = [part for part in range(1, mask) if part & mask == part]
                    best[mask, at] = min(best[part, at] + best[mask ^ part, at] for part in splits)
            for _ in among:
                for at in among:
                    best[mask, at] = min([best[mask, at], *(cost + best[mask, to] for to, cost in weight[at])])
        return best[(1 << len(ends)) - 1, source] if ends else 0.0


def sent(graph: Graph, candidate: Candidate, block: str, axis: int) -> tuple[Counter[str], Counter[str]]:
    """The collectives of one call of a block on an axis, without those of parameters: forward, backward."""
    found = graph.block(block)
    values = found.values()
    parameters = {parameter.value.name for parameter in found.parameters}
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for arc in candidate.block(block).arcs:
        if arc.value in parameters or changed_axis(arc.source, arc.target) != axis:
            continue
        how = conversion(arc.source[axis], arc.target[axis], values[arc.value].differentiable)
        assert how is not None
        for side, kind in ((forward, how.forward), (backward, how.backward)):
            if kind is not None and kind not in ("slice", "pad", "mask", "scale"):
                side[kind] += 1
    return forward, backward


MEGATRON_LLAMA: Mapping[str, str] = {
    "q_proj": "n", "k_proj": "n", "v_proj": "n", "o_proj": "k", "gate_proj": "n", "up_proj": "n", "down_proj": "k",
}  # fmt: skip
