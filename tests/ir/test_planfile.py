"""plan.json: exact round trip, and one clear line for every file that is not a valid plan."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.ir.graph import Block, Call, DType, Graph, Node, Parameter, Ref, Symbol, Value
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.names import DTYPES, NAME
from autopar.ir.pipeline.split_blocks import split_block, split_like
from autopar.ir.placement import Invariant, Partial, Placements, Replicate, Shard
from autopar.ir.plan import BlockPlan, Candidate, Conversion, NodePlan, Precision
from autopar.ir.plan_file import plan_file as planfile
from autopar.ir.plan_file.codec import decode, decode_arg, encode, encode_arg
from autopar.ir.plan_file.document import ClusterInfo, ModelInfo, Parallelism

R, I, P = Replicate(), Invariant(), Partial()  # noqa: E741


def small_graph() -> Graph:
    """loss = sum(x @ w.T), x [B, 8], w [4, 8]."""
    x, w = Value("x", ("B", 8), "float32"), Value("w", (4, 8), "float32", True)
    y, loss = Value("y", ("B", 4), "float32", True), Value("loss", (), "float32", True)
    nodes = (
        Node("aten.linear", (Ref("x"), Ref("w"), None), (), (y,), "fc", "net.py:7"),
        Node("aten.sum", (Ref("y"),), (), (loss,)),
    )
    block = Block("Net", (x,), (Parameter(w, "fc.weight"),), nodes, ("loss",))
    return Graph("net", (x,), (block,), (Call("Net", "", ("x",), ("loss",), ("fc.weight",)),), "loss", 4, "f00d")


def small_candidate() -> Candidate:
    """dp=2 x tp=2, w column-sharded."""
    x: Placements = (Shard(0), R)
    linear = NodePlan("y", (x, (R, Shard(0))), ((Shard(0), Shard(1)),), ("b", "n"))
    total = NodePlan("loss", ((Shard(0), Shard(1)),), ((P, P),), ("b", "n"))
    conversions = (Conversion("loss", (P, P), (P, I)), Conversion("loss", (P, I), (I, I)))
    plan = BlockPlan(
        block="Net",
        inputs=(x,),
        parameters=((R, Shard(0)),),
        outputs=((I, I),),
        nodes=(linear, total),
        conversions=conversions,
        zero=3,
    )
    return Candidate(Mesh((Axis("dp", 2), Axis("tp", 2))), (plan,), 4, Precision("bfloat16", "float32"))


def small_plan() -> planfile.Plan:
    return planfile.assemble_plan(
        small_graph(),
        small_candidate(),
        model=ModelInfo("net", "f00d", 32),
        cluster=ClusterInfo("local:4", 4),
        parallelism=Parallelism(dp=2, tp=2, zero=3),
        optimizer="adamw",
    )


def test_round_trip_is_exact() -> None:
    plan = small_plan()
    decoded = planfile.decode_plan(plan.to_json())
    assert decoded == plan
    assert decoded.to_json() == plan.to_json()


def test_keys_of_the_contract() -> None:
    data = json.loads(small_plan().to_json())
    keys = {"model", "cluster", "mesh", "parallelism", "batch", "schedule", "stages", "ops", "recompute", "predicted"}
    assert keys | {"baselines", "search", "replicated_ops"} <= data.keys()
    assert data["mesh"] == {"axes": [{"name": "dp", "size": 2}, {"name": "tp", "size": 2}]}
    assert set(data["parallelism"]) == {"dp", "tp", "pp", "cp", "ep", "zero", "virtual_stages"}
    assert {"global", "micro", "num_microbatches", "seq"} <= data["batch"].keys()
    assert set(data["baselines"]) == {"ddp", "fsdp"}


texts = st.text(st.characters(codec="utf-8"), max_size=8)
lines = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=8)
names = st.from_regex(rf"\A{NAME}\Z", fullmatch=True).map(lambda name: name[:8])
operations = st.sampled_from(("aten.add.Tensor", "ap.dropout", "_lib::op"))
dtypes = st.sampled_from(sorted(DTYPES))
scalars = (
    st.builds(Ref, texts)
    | st.builds(Symbol, st.sampled_from(["B", "16*B", 3]))
    | st.builds(DType, texts)
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none()
    | texts
)
args = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6)
values = st.builds(Value, names, st.lists(st.integers(0, 9) | st.just("2*B"), max_size=3).map(tuple), dtypes, st.booleans())
nodes = st.builds(
    Node,
    operations,
    st.lists(args, max_size=3).map(tuple),
    st.dictionaries(texts, args, max_size=2).map(lambda items: tuple(items.items())),
    st.lists(values, min_size=1, max_size=2).map(tuple),
    lines,
    lines,
    st.booleans(),
)
blocks = st.builds(
    Block,
    names,
    st.lists(values, max_size=2).map(tuple),
    st.lists(st.builds(Parameter, values, names, st.booleans(), st.booleans()), max_size=2).map(tuple),
    st.lists(nodes, max_size=2).map(tuple),
    st.lists(names, max_size=2).map(tuple),
    st.lists(st.tuples(names, names), max_size=1).map(tuple),
)


@given(st.builds(dataclasses.replace, st.just(small_graph()), blocks=st.lists(blocks, max_size=2).map(tuple), name=names))
@settings(max_examples=60, deadline=None)
def test_any_graph_round_trips(graph: Graph) -> None:
    text = json.loads(json.dumps(json.loads(planfile.msgspec.json.encode(encode(graph)))))
    assert decode(Graph, text) == graph


@given(args)
@settings(max_examples=100, deadline=None)
def test_any_argument_round_trips(arg: Any) -> None:
    decoded = decode_arg(json.loads(planfile.msgspec.json.encode(encode_arg(arg))))
    assert decoded == arg and repr(decoded) == repr(arg)  # 1, 1.0 and True are told apart


def edit(path: str, value: Any) -> str:
    """The small plan's text with one place changed (``mesh.axes.0.size``); None removes it."""
    data = json.loads(small_plan().to_json())
    *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
    place = data
    for part in parents:
        place = place[part]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a whole JSON"),
        (small_plan().to_json()[:500], "not a whole JSON"),
        ("[1]", "schema_version"),
        ("{}", "schema_version"),
        (edit("schema_version", 99), "schema version 99"),
        (edit("schema_version", True), "has no schema_version"),
        (edit("mesh", None), "mesh"),
        (edit("ops", None), "ops"),
        (edit("mesh.axes.0.size", 3), "3"),
        (edit("mesh.axes.0.size", "two"), "mesh"),
        (edit("mesh.axes.0.name", "xx"), "dp"),
        (edit("batch.global", 5), "multiple of 2"),
        (edit("batch.micro", 7), "batch.micro"),
        (edit("ops.0.node", "nobody"), "nobody"),
        (edit("ops.0.block", "Nothing"), "Nothing"),
        (edit("ops.0.operands.1", "R S(9)"), "S(9)"),
        (edit("ops.0.operands.1", "R"), "1 axes"),
        (edit("ops.0.operands.1", "R Q"), "'Q' is not a placement"),
        (edit("ops.0.operands.1", "R S(1)"), "do not reach"),
        (edit("ops.0.operands", ["R S(0)"]), "expected 2 entries"),
        (edit("blocks.0.parameters.0", "R S(0,3)"), "does not divide"),
        (edit("blocks.0.conversions.0.value", "zzz"), "zzz"),
        (edit("blocks.0.conversions.0.target", "I I"), "exactly one axis"),
        (edit("blocks.0.conversions.1", None), "do not reach"),
        (edit("blocks.0.conversions.0", None), "starts where"),
        (edit("blocks.0.zero", 7), "zero=7"),
        (edit("blocks.0.outputs.0", "P P"), "loss"),
        (edit("blocks.0.block", "Other"), "Net"),
        (edit("model.fingerprint", "beef"), "fingerprint"),
        (edit("graph.blocks.0.nodes.0.args.0", {"ref": "ghost"}), "fit together"),
        (edit("graph.blocks.0.nodes.0.args.0", {"import": "os"}), "not an argument"),
    ],
)
def test_a_bad_file_is_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        planfile.decode_plan(text, "plan.json")
    message = str(caught.value)
    assert words in message and "plan.json" in message and "\n" not in message


@pytest.mark.parametrize("version", [0, 1, None])
def test_an_old_file_is_refused_with_the_command_that_plans_again(version: int | None) -> None:
    """Also where everything else has the keys of today."""
    with pytest.raises(PlanError) as caught:
        planfile.decode_plan(edit("schema_version", version), "plan.json")
    message = str(caught.value)
    assert "plan.json" in message and "`autopar plan MODEL --cluster CLUSTER -o plan.json`" in message and "\n" not in message


def test_a_missing_file_is_one_clear_line(tmp_path: Any) -> None:
    with pytest.raises(PlanError, match="No such file or directory: check the path"):
        planfile.load_plan(tmp_path / "none.json")


@pytest.mark.parametrize("places", [(1,), (1, 2), (2,)])
def test_splits_are_repeated_on_the_graph_that_was_captured(places: tuple[int, ...]) -> None:
    """A plan of split blocks (a pipeline's) fits its model again."""
    graph = small_graph()
    mean = Node("aten.mul.Tensor", (Ref("y"), 2.0), (), (Value("z", ("B", 4), "float32", True),))
    linear, total = graph.blocks[0].nodes
    nodes = (linear, mean, dataclasses.replace(total, args=(Ref("z"),)))
    graph = dataclasses.replace(graph, blocks=(dataclasses.replace(graph.blocks[0], nodes=nodes),))
    split = split_block(graph, "Net", places)
    assert len(split.blocks) == len(places) + 1
    assert split_like(graph, split) == split and split_like(graph, graph) == graph
