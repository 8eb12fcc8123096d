"""What autograd saves and what is offloaded after the forward of a block is what the cost model predicts."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from support.harness.end_to_end import Prepared, prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.oracles.live_storages import Storages
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from torch import Tensor

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.recompute import RecomputePlan, with_least_recompute
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue, aliases
from autopar.ir.plan import BlockPlan, Candidate, Precision
from autopar.ir.verify import verify_candidate
from autopar.passes.lower import lower
from autopar.program.build import render

F32 = Precision("float32", "float32")
CLUSTER = Cluster.parse("local:4")
TOKEN_BYTES = 10
"""What a table or a loss cut over a model axis keeps for each token besides: a place and two flags. The models here are so narrow
that it shows."""


def drawn(prepared: Prepared, seed: int, kept: float, offload: float, axes: dict[str, int]) -> Candidate:
    """A share `kept` of what may be recomputed is saved, as the solver writes it down; `offload` of that is offloaded. A result
    and what its operation keeps for itself go together: one without the other saves no work. Integers stay: targets that are not
    contiguous are saved as a copy."""
    graph, random = prepared.graph, Random(seed)
    candidate = drawn_candidate(graph, mesh_of(**axes), seed, wild=0.0, precision=F32)
    plans = []
    for plan in candidate.blocks:
        block = graph.block(plan.block)
        costs = BlockCosts(block, candidate.mesh, candidate.batch, CLUSTER)
        same = aliases(block, plan.nodes, plan.conversions)
        saved = RecomputePlan.of(costs, plan).saved
        chosen = {state[0].rstrip("+"): random.random() < kept for state in map(same.find, saved)}

        def is_saved(state: PlacedValue, same: Aliases = same, chosen: dict[str, bool] = chosen) -> bool:
            return chosen.get(same.find(state)[0].rstrip("+"), False)

        plan = with_least_recompute(costs, plan, is_saved)
        sizes = RecomputePlan.of(costs, plan).saved
        floats = {name for name, value in block.values().items() if value.dtype.startswith("float")}
        left = [state for state, size in sizes.items() if state[0] in floats and size > 0.01 * sum(sizes.values())]
        plans.append(replace(plan, offload=tuple(state for state in left if random.random() < offload)))
    candidate = replace(candidate, blocks=tuple(plans))
    verify_candidate(graph, candidate)
    return candidate


def expected(prepared: Prepared, candidate: Candidate, plan: BlockPlan) -> tuple[float, float]:
    """Bytes that the forward of a block makes and leaves, and those of them on the host. Inputs were there before."""
    block = prepared.graph.block(plan.block)
    replay = RecomputePlan.of(BlockCosts(block, candidate.mesh, candidate.batch, CLUSTER), plan)
    inputs: set[PlacedValue] = {replay.same.find((value.name, at)) for value, at in zip(block.inputs, plan.inputs, strict=True)}
    made = sum(size for state, size in replay.saved.items() if state not in inputs or state in replay.offloaded)
    return made, sum(replay.offloaded.values())


def settled(made: dict[Any, int], most: float) -> int:
    """Bytes of the storages that live. A thread of gloo lets go of what it sent when it gets to run: where they are more than
    `most`, it has ten seconds."""
    seen, same, end = -1, 0, time.monotonic() + 10
    while same < 3 and time.monotonic() < end:
        alive = sum(size for key, size in made.items() if not key.expired())
        same = same + 1 if alive == seen and alive <= most else 0
        seen = alive
        time.sleep(0.002)
    return seen


def held(text: str, state: dict[str, Tensor], batch: dict[str, Tensor], most: list[float]) -> list[tuple[str, int, int]]:
    """On a rank: of each call the block's class, the bytes that its forward made and that are alive when all its results are
    dropped but their graph, and the bytes that went to the host. `most`: see `settled`, for each call."""
    parallel = parallel_model(text, state)
    host, found = parallel.program.mesh.host_memory, []
    send, gone = host.copy_to_host, []

    def counted(x: Tensor) -> Tensor:
        gone.append(x.numel() * x.element_size())
        return send(x)

    host.copy_to_host = counted  # type: ignore[method-assign]

    def watched(block: Any, forward: Any) -> Any:
        def run(*args: Any) -> Any:
            gone.clear()
            with Storages() as watch:
                results = forward(*args)
            single = isinstance(results, Tensor)
            results = (results,) if single else results
            graph = [x.grad_fn for x in results]
            copies = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in results)
            del results
            alive = settled(watch.made, most[len(found)])
            found.append((type(block).__name__, alive, sum(gone)))
            del graph
            return copies[0] if single else copies

        return run

    for block in parallel.program.blocks():
        block.forward = watched(block, block.forward)
    parallel(**batch)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_saved_and_offloaded_bytes_are_the_predicted_ones(name: str, ranks: RankPool) -> None:
    prepared = prepare(name, torch.float32, batch=16)
    # seeds where no attention has its heads from a reduce-scatter: the kernel of CPUs gives its result another layout then, which
    # the reshape after it copies
    cases = [(0, {"dp": 4}, 1.0, 0.0), (1, {"dp": 4}, 0.5, 0.3), (2, {"dp": 4}, 0.0, 1.0), (5, {"dp": 2, "tp": 2}, 0.3, 0.3),
             (5, {"dp": 1, "tp": 4}, 0.3, 0.3)]  # fmt: skip
    for seed, axes, kept, offload in cases:
        candidate = drawn(prepared, seed, kept, offload, axes)
        lowered = lower(prepared.graph, candidate)
        text = render(lowered)
        wanted = [expected(prepared, candidate, candidate.block(call.block)) for call in prepared.graph.calls]
        slack = 64 + (0 if "tp" not in axes else TOKEN_BYTES * 16 * 16 // axes["dp"])
        most = [1.02 * made + slack for made, _ in wanted]
        found = ranks.run(held, text, prepared.state, prepared.batch, most, timeout=200)[0]
        for (made, waiting), (block, alive, host) in zip(wanted, found, strict=True):
            assert host == waiting, (block, axes, kept)
            assert alive == pytest.approx(made, rel=0.02, abs=slack), (block, axes, kept)
