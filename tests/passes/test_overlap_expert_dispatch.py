"""Work between expert dispatch and its first use overlaps with the exchange of tokens."""

from __future__ import annotations

from support.harness.end_to_end import prepare
from support.plans.expert_forms import only

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Precision
from autopar.passes.lower import lower
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions


def test_shared_experts_overlap_with_dispatch() -> None:
    graph = prepare("routed").graph
    options = SearchOptions(
        batch=16, precision=Precision("float64", "float64"), force={"pp": 1, "ep": 4},
        pins={"up": {"ep": "S(0)"}, "moe_experts": {"ep": "S(0)"}}, registry=only("dispatched"),
    )  # fmt: skip
    (block,) = lower(graph, search(graph, Cluster.parse("local:4"), options).candidate).blocks
    ops = [node.op for node in block.block.nodes]
    start, wait = ops.index("ap.moe_experts_start"), ops.index("ap.moe_experts_wait")
    assert ops[start + 1 : wait].count("aten.linear") == 2  # the shared expert
    pending, result = block.block.nodes[start].name, block.block.nodes[wait].name
    assert (pending, result) == (f"{result}_start", result)
    assert result in block.block.nodes[wait + 1].operands()
