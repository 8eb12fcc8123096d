"""Placements on the data axis follow from the graph."""

from __future__ import annotations

from support.models.handwritten_blocks import Builder, gpt2_graph
from support.models.solver_graphs import graph_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.graph import Call, Graph, Value
from autopar.ir.placement import Invariant, Partial, Replicate, Shard
from autopar.rules.registry import default_registry
from autopar.solve.problem.boundary import BlockBoundaries, Slot
from autopar.solve.problem.data_axis import AxisStrategies
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def test_activations_are_cut_along_the_batch_and_the_loss_is_whole() -> None:
    graph = gpt2_graph(layers=2)
    boundary = BlockBoundaries(graph)
    axis = AxisStrategies(graph, default_registry()).on_data_axis(4)
    at = {slot: axis.classes[number] for slot, number in boundary.classes.items()}
    assert at[Slot("Prologue", "in", 0)] == at[Slot("GPT2Block", "in", 0)] == at[Slot("GPT2Block", "out", 0)] == Shard(0)
    assert all(place == Replicate() for slot, place in at.items() if slot.side == "param")
    assert at[Slot("Epilogue", "out", 0)] == Invariant()
    epilogue = {node.op: axis.strategies["Epilogue", node.name] for node in graph.block("Epilogue").nodes}
    assert epilogue["ap.cross_entropy_sum"].results == (Partial(),)
    assert epilogue["ap.count_valid"].results == (Partial(),)
    # the sum stays partial, the count is whole: the loss is reduced once
    assert epilogue["aten.div.Tensor"].operands == (Partial(), Replicate())


def test_tied_parameters_are_one_class() -> None:
    graph = gpt2_graph(layers=2)
    boundary = BlockBoundaries(graph)
    assert boundary.classes[Slot("Prologue", "param", 0)] == boundary.classes[Slot("Epilogue", "param", 2)]
    assert set(boundary.shared) == {"transformer.wte.weight"}


def test_statistics_over_the_batch_are_global() -> None:
    """A mean over the batch is summed over the ranks; what is computed from it is whole; the data stay cut."""
    b = Builder("Only")
    x = b.input("hidden", ("B", 16), differentiable=False)
    y = b.op("aten.linear", x, b.parameter("w.weight", (16, 16)), shape=("B", 16), name="y")
    mean = b.op("aten.sum.dim_IntList", y, (0,), True, shape=(1, 16), name="mean")
    centred = b.op("aten.sub.Tensor", y, mean, shape=("B", 16), name="centred")
    block = b.block(b.op("aten.sum", b.op("aten.mul.Tensor", centred, centred, shape=("B", 16)), shape=(), name="loss"))  # type: ignore[arg-type]
    graph = graph_of((block,), ("Only",), ("B", 16), 8, "float32")
    result = search(graph, Cluster.parse("local:4"), SearchOptions(force={"dp": 4}))
    plans = {plan.node: plan for plan in result.candidate.blocks[0].nodes}
    assert plans["mean"].results == ((Partial(),),)
    assert plans["centred"].operands == ((Shard(0),), (Replicate(),))
    assert plans["centred"].results == ((Shard(0),),)


def test_a_batch_that_is_a_number() -> None:
    b = Builder("Only")
    x = b.input("hidden", (8, 16), differentiable=False)
    y = b.op("aten.linear", x, b.parameter("w.weight", (16, 16)), shape=(8, 16))
    block = b.block(b.op("aten.sum", y, shape=(), name="loss"))  # type: ignore[arg-type]
    call = Call("Only", "", ("x",), ("loss",), ("w.weight",))
    graph = Graph("static", (Value("x", (8, 16), "float32"),), (block,), (call,), "loss", 8, "hand", batch_is_symbolic=False)
    result = search(graph, Cluster.parse("local:2"), SearchOptions(force={"dp": 2}))
    assert result.candidate.blocks[0].inputs == ((Shard(0),),)
    assert result.candidate.blocks[0].outputs == ((Invariant(),),)
