"""What is kept and what runs again: played through with names alone, against torch's own checkpointing, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.blocks import Builder, gpt2_graph
from support.candidates import drawn_candidate, mesh_of
from support.hand_plans import block_plan
from support.replays import with_replays
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.memory import OFFLOAD_WINDOW, block_memory
from autopar.cost_models.replay import Replay, again_without
from autopar.cost_models.storages import Aliases, State, aliases
from autopar.errors import PlanError
from autopar.ir.graph import Block
from autopar.ir.plan import Arc, BlockPlan

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


def replay(costs: BlockCosts, plan: BlockPlan) -> Replay:
    return Replay.of(costs, plan, aliases(costs.block, plan.nodes, plan.arcs))


def names(sizes: Any) -> dict[str, float]:
    return {state[0]: size for state, size in sizes.items()}


X, WIDE = 16 * 32 * 4, 16 * 64 * 4


def test_kept_and_recomputed_by_hand() -> None:
    assert names(replay(*priced(perceptron())).kept) == {"x": X, "one": WIDE, "two": WIDE}
    gelu = replay(*priced(perceptron(), again=("two",)))
    assert names(gelu.kept) == {"x": X, "one": WIDE} and names(gelu.recomputed) == {"two": WIDE}
    both = replay(*priced(perceptron(), again=("one", "two")))
    assert names(both.kept) == {"x": X} and names(both.recomputed) == {"one": WIDE, "two": WIDE}
    product = replay(*priced(perceptron(), again=("one",)))
    assert names(product.kept) == {"x": X, "two": WIDE} and names(product.recomputed) == {"one": WIDE}


def test_a_chain_is_paid_for_once() -> None:
    """`again_without` takes the least that makes what is missing."""
    costs, plan = priced(perceptron())
    only_two = again_without(costs, plan, lambda state: state[0] in ("x", "two"), {"one", "two", "out"})
    assert only_two.again == ("one",)
    nothing = again_without(costs, plan, lambda state: state[0] == "x", {"one", "two", "out"})
    assert nothing.again == ("one", "two")
    assert replace(plan, recompute=True) != nothing and replay(costs, replace(plan, recompute=True)).nodes == nothing.again


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def test_whole_block_recomputation_is_torchs_checkpoint() -> None:
    """Which stops early: the last product does not run again."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32, bias=False))
    x = torch.rand(16, 32, requires_grad=True)
    with Counting() as plain:
        out = model(x)
        plain.found.clear()
        out.sum().backward()
    with Counting() as again:
        out = checkpoint(model, x, use_reentrant=False)
        again.found.clear()
        out.sum().backward()
    ours = replay(*priced(perceptron(), recompute=True)).nodes
    repeated = again.found - plain.found
    assert ours == ("one", "two")
    assert repeated["aten.addmm"] == 1 and repeated["aten.gelu"] == 1 and repeated["aten.mm"] == 0


def test_offloaded_tensors_wait_on_the_host() -> None:
    costs, plan = priced(perceptron())
    state: State = next(state for state in replay(costs, plan).kept if state[0] == "one")
    moved = replace(plan, offload=(state,))
    assert names(replay(costs, moved).offloaded) == {"one": WIDE} and set(names(replay(costs, moved).kept)) == {"x", "one", "two"}
    stays, goes = block_memory(costs, plan), block_memory(costs, moved)
    assert (goes.internal, goes.host) == (stays.internal - WIDE, WIDE) and stays.host == 0
    assert goes.working == stays.working + OFFLOAD_WINDOW * WIDE
    assert goes.made == stays.made + (OFFLOAD_WINDOW - 1) * WIDE
    with pytest.raises(PlanError, match="nobody kept"):
        replay(costs, replace(moved, again=("one", "two")))


def played(costs: BlockCosts, plan: BlockPlan, found: Replay, same: Aliases, without: State | None = None) -> bool:
    """Whether a backward has all that it asks for: it begins with stored parameters and what was kept, and runs again."""
    block = costs.block
    plans = {each.node: each for each in plan.nodes}
    stored = {same.find((p.value.name, at)) for p, at in zip(block.parameters, plan.parameters, strict=True)}
    there = stored | {state for state in found.kept if state != without}
    made: set[State] = set()

    def has(state: State) -> bool:
        return state in made or same.find(state) in there

    arcs: dict[str, list[Arc]] = {}
    for arc in found.arcs:
        arcs.setdefault(arc.value, []).append(arc)

    def convert(value: str) -> bool:
        """A chain of conversions, which a plan may list in any order."""
        waiting = list(arcs.get(value, ()))
        while waiting:
            ready = [arc for arc in waiting if has((value, arc.source))]
            if not ready:
                return False
            made.update((value, arc.target) for arc in ready)
            waiting = [arc for arc in waiting if arc not in ready]
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
    asked = [(kept.value, kept.placements) for node in plan.nodes for kept in costs.kept(node)]
    return all(has(state) or (state[0].endswith("+") and (state[0], ()) in made) for state in asked)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_suffices_and_nothing_of_it_is_idle(seed: int) -> None:
    """Random plans that run random parts again: the backward finds all it asks for, and misses each kept tensor that is gone."""
    graph = gpt2_graph(layers=1, hidden=64, heads=4, vocabulary=256, seq=16)
    mesh = mesh_of(dp=2, tp=4)
    candidate = drawn_candidate(graph, mesh, seed)
    shares = (0.0, 0.3, 0.7, 1.0)
    candidate = with_replays(graph, candidate, seed, shares[seed % 4], offload=0.0)
    for block in graph.blocks:
        costs, plan = BlockCosts(block, mesh, graph.batch, Cluster.parse("dgx-h100:1")), candidate.block(block.name)
        for each in (plan, replace(plan, again=(), again_arcs=(), recompute=True)):
            same = aliases(block, each.nodes, each.arcs)
            found = Replay.of(costs, each, same)
            assert played(costs, each, found, same)
            assert not any(played(costs, each, found, same, without=state) for state in found.kept)
