"""What is saved and what is recomputed: replayed with names alone, against torch's own checkpointing, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models.handwritten_blocks import Builder, gpt2_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_replays
from support.plans.handwritten_candidates import block_plan
from support.plans.mesh import mesh_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import OFFLOAD_WINDOW, block_memory
from autopar.cost_models.step.recompute import RecomputePlan, with_least_recompute
from autopar.cost_models.tensors.sizes import PlacedValue
from autopar.errors import PlanError
from autopar.ir.graph import Block
from autopar.ir.plan import BlockPlan, Conversion

MESH = mesh_of(dp=1)


def perceptron() -> Block:
    """linear, GELU, linear, over 16 rows of 32."""
    b = Builder("MLP")
    x = b.input("x", ("B", 32))
    one = b.op("aten.linear", x, b.parameter("a", (64, 32)), b.parameter("ab", (64,)), shape=("B", 64), name="one")
    two = b.op("aten.gelu", one, shape=("B", 64), name="two")
    return b.block(b.op("aten.linear", two, b.parameter("c", (32, 64)), shape=("B", 32), name="out"))  # type: ignore[arg-type]


def priced(block: Block, **changes: Any) -> tuple[BlockCosts, BlockPlan]:
    plan = replace(block_plan(block, MESH, 0, {}, True, 16), **changes)
    return BlockCosts(block, MESH, 16, replace(Cluster.parse("dgx-h100:1"), size=1)), plan


def recompute_plan(costs: BlockCosts, plan: BlockPlan) -> RecomputePlan:
    return RecomputePlan.of(costs, plan)


def names(sizes: Any) -> dict[str, float]:
    return {state[0]: size for state, size in sizes.items()}


X, WIDE = 16 * 32 * 4, 16 * 64 * 4


def test_saved_and_recomputed_by_hand() -> None:
    assert names(recompute_plan(*priced(perceptron())).saved) == {"x": X, "one": WIDE, "two": WIDE}
    gelu = recompute_plan(*priced(perceptron(), recompute_nodes=("two",)))
    assert names(gelu.saved) == {"x": X, "one": WIDE} and names(gelu.recomputed) == {"two": WIDE}
    both = recompute_plan(*priced(perceptron(), recompute_nodes=("one", "two")))
    assert names(both.saved) == {"x": X} and names(both.recomputed) == {"one": WIDE, "two": WIDE}
    product = recompute_plan(*priced(perceptron(), recompute_nodes=("one",)))
    assert names(product.saved) == {"x": X, "two": WIDE} and names(product.recomputed) == {"one": WIDE}


def test_least_recomputation_of_a_chain() -> None:
    """`with_least_recompute` takes the least that produces what is not saved."""
    costs, plan = priced(perceptron())
    only_two = with_least_recompute(costs, plan, lambda state: state[0] in ("x", "two"))
    assert only_two.recompute_nodes == ("one",)
    nothing = with_least_recompute(costs, plan, lambda state: state[0] == "x")
    assert nothing.recompute_nodes == ("one", "two")
    assert (
        replace(plan, recompute=True) != nothing
        and recompute_plan(costs, replace(plan, recompute=True)).nodes == nothing.recompute_nodes
    )


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_whole_block_recomputation_is_torchs_checkpoint() -> None:
    """Which stops early: the last product is not recomputed."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False))
    x = torch.rand(16, 32, requires_grad=True)
    with Counting() as plain:
        out = model(x)
        plain.found.clear()
        out.sum().backward()
    with Counting() as recomputing:
        out = checkpoint(model, x, use_reentrant=False)
        recomputing.found.clear()
        out.sum().backward()
    ours = recompute_plan(*priced(perceptron(), recompute=True)).nodes
    repeated = recomputing.found - plain.found
    assert ours == ("one", "two")
    assert repeated["aten.addmm"] == 1 and repeated["aten.gelu"] == 1 and repeated["aten.mm"] == 0


def test_offloaded_tensors_are_in_host_memory() -> None:
    costs, plan = priced(perceptron())
    state: PlacedValue = next(state for state in recompute_plan(costs, plan).saved if state[0] == "one")
    offloading = replace(plan, offload=(state,))
    assert names(recompute_plan(costs, offloading).offloaded) == {"one": WIDE} and set(
        names(recompute_plan(costs, offloading).saved)
    ) == {
        "x",
        "one",
        "two",
    }
    before, after = block_memory(costs, plan), block_memory(costs, offloading)
    assert after.internal_saved_bytes == before.internal_saved_bytes - WIDE
    assert (before.offloaded_bytes, after.offloaded_bytes) == (0, WIDE)
    assert after.backward_bytes == before.backward_bytes + OFFLOAD_WINDOW * WIDE
    assert after.forward_bytes == before.forward_bytes + (OFFLOAD_WINDOW - 1) * WIDE
    with pytest.raises(PlanError, match="is not saved"):
        recompute_plan(costs, replace(offloading, recompute_nodes=("one", "two")))


def backward_succeeds(costs: BlockCosts, plan: BlockPlan, found: RecomputePlan, without: PlacedValue | None = None) -> bool:
    """Whether a backward has all that it uses: it begins with stored parameters and saved tensors, and recomputes."""
    block, same = costs.block, found.same
    plans = {each.node: each for each in plan.nodes}
    stored = {same.find((p.value.name, at)) for p, at in zip(block.parameters, plan.parameters, strict=True)}
    there = stored | {state for state in found.saved if state != without}
    made: set[PlacedValue] = set()

    def has(state: PlacedValue) -> bool:
        return state in made or same.find(state) in there

    conversions: dict[str, list[Conversion]] = {}
    for each in found.conversions:
        conversions.setdefault(each.value, []).append(each)

    def convert(value: str) -> bool:
        """A chain of conversions, which a plan may list in any order."""
        pending = list(conversions.get(value, ()))
        while pending:
            ready = [each for each in pending if has((value, each.source))]
            if not ready:
                return False
            made.update((value, each.target) for each in ready)
            pending = [each for each in pending if each not in ready]
        return True

    for value in (*block.inputs, *(parameter.value for parameter in block.parameters)):
        if not convert(value.name):
            return False
    for node in block.nodes:
        if node.name in found.nodes:
            if not all(has(state) for state in zip(node.operands(), plans[node.name].operands, strict=True)):
                return False
            made.update((value.name, at) for value, at in zip(node.outputs, plans[node.name].results, strict=True))
            made.add((f"{node.name}+", ()))
        if not all(convert(value.name) for value in node.outputs):
            return False
    used = [(saved.value, saved.placements) for node in plan.nodes for saved in costs.saved_tensors(node)]
    return all(has(state) or (state[0].endswith("+") and (state[0], ()) in made) for state in used)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_saved_suffices_and_all_of_it_is_used(seed: int) -> None:
    """Plans with random recomputation: the backward finds all that it uses, and misses each saved tensor that is taken away."""
    graph = gpt2_graph(layers=1, hidden=64, heads=4, vocabulary=256, seq=16)
    mesh = mesh_of(dp=2, tp=4)
    candidate = drawn_candidate(graph, mesh, seed)
    shares = (0.0, 0.3, 0.7, 1.0)
    candidate = with_replays(graph, candidate, seed, shares[seed % 4], offload=0.0)
    for block in graph.blocks:
        costs, plan = BlockCosts(block, mesh, graph.batch, Cluster.parse("dgx-h100:1")), candidate.block(block.name)
        for each in (plan, replace(plan, recompute_nodes=(), recompute_conversions=(), recompute=True)):
            found = RecomputePlan.of(costs, each)
            assert backward_succeeds(costs, each, found)
            assert not any(backward_succeeds(costs, each, found, without=state) for state in found.saved)
