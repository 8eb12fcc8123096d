"""Seconds of a call against the bytes that it saves: no plan is below a line, and the best ones are on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
from support.models.handwritten_blocks import gpt2_graph
from support.models.solver_graphs import drawn_graph, llama_graph
from support.plans.drawn_candidates import drawn_candidate
from support.plans.drawn_recomputation import with_kept, with_partition, with_replays
from support.plans.mesh import mesh_of

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.software_stacks import with_stack
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.block_memory import BlockMemory, call_saved_bytes
from autopar.cost_models.step.call_trace import CallTrace
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import BlockPlan, Candidate
from autopar.rules.registry import default_registry
from autopar.solve.bounds.block_relaxation import relax_blocks
from autopar.solve.bounds.call_lines import DurationLine, SavedLine, duration_lines, saved_lines, traded_lines
from autopar.solve.bounds.memory_frontier import memory_frontier
from autopar.solve.problem.problem import Problem
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions
from autopar.solve.space.problem_tables import ProblemTables

GRAPHS = ("gpt2", "llama", "drawn", "drawn else")
MESHES = ({"dp": 2, "tp": 4}, {"dp": 1, "tp": 8})
_NOTHING = BlockMemory(0.0, (), 0.0, 0.0)


@lru_cache
def graph_of(name: str) -> Graph:
    if name == "gpt2":
        return gpt2_graph(layers=3, hidden=1024, heads=8, vocabulary=4096, seq=512, batch=16, dtype="bfloat16")
    if name == "llama":
        return llama_graph(layers=2, batch=16, seq=1024)
    return drawn_graph(5 if name == "drawn" else 11)


@lru_cache
def problem_of(name: str, mesh: int) -> Problem:
    graph, cluster, registry = graph_of(name), Cluster.parse("dgx-h100:1"), default_registry()
    tables = ProblemTables(graph, cluster, SearchOptions(), registry)
    return tables.problem(GridPoint(mesh_of(**MESHES[mesh]), 1), (0,))


@lru_cache
def lines_of(name: str, mesh: int) -> dict[str, tuple[DurationLine, tuple[SavedLine, ...], tuple[SavedLine, ...]]]:
    problem, out = problem_of(name, mesh), {}
    for each in relax_blocks(problem):
        fastest = duration_lines(problem, each.name, 30.0)[0]
        out[each.name] = fastest, traded_lines(problem, each, fastest.least_seconds, 30.0), saved_lines(each)
    return out


def taken(problem: Problem, plan: BlockPlan) -> tuple[float, float]:
    """(seconds, saved bytes) of one call on average, by the cost model: all that its calls save, as if no others did."""
    graph = problem.graph
    block = problem.blocks[plan.block].block
    trace = CallTrace.of(BlockCosts(block, problem.mesh, problem.graph.batch, problem.cluster), plan)
    saved = call_saved_bytes(graph, {each.name: trace.memory if each is block else _NOTHING for each in graph.blocks})
    seconds = sum(each for each, _ in (*trace.forward, *trace.backward))
    return seconds, sum(saved) / graph.count(plan.block)


def drawn_plans(problem: Problem, seed: int) -> Iterator[Candidate]:
    """One sharding with nothing recomputed, in parts, as a whole, at random, and as planners do."""
    graph, cluster = problem.graph, problem.cluster
    plan = drawn_candidate(graph, problem.mesh, seed, wild=0.1 * (seed % 4))
    yield plan
    yield with_partition(graph, plan, cluster, "tp")
    yield replace(plan, blocks=tuple(replace(each, recompute=True) for each in plan.blocks))
    for share in (0.1, 0.4, 0.7):
        yield with_kept(graph, plan, cluster, seed, share)
        yield with_replays(graph, plan, seed, share, offload=0.0)


@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("name", GRAPHS)
def test_no_drawn_plan_is_below_a_line(name: str, mesh: int) -> None:
    problem, lines = problem_of(name, mesh), lines_of(name, mesh)
    assert any(traded for _, traded, _ in lines.values())
    checked = 0
    for seed in range(6):
        for candidate in drawn_plans(problem, seed):
            for plan in candidate.blocks:
                try:
                    seconds, saved = taken(problem, plan)
                except PlanError:  # it reads what is neither saved nor recomputed
                    continue
                fastest, traded, _ = lines[plan.block]
                for line in traded:
                    checked += 1
                    beyond = seconds - fastest.least_seconds
                    assert line.recompute * beyond + line.saved * saved >= line.least - 1e-9, f"{plan.block} {seed} {line}"
    assert checked >= 100


@pytest.mark.parametrize("mesh", range(len(MESHES)))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_plans_of_the_frontier_are_near_the_lines(name: str, mesh: int) -> None:
    """What the search finds under one sharding is above the lines, not by much, and nearer to them than to those without
    placements."""
    problem, lines = problem_of(name, mesh), lines_of(name, mesh)
    frontier = memory_frontier(problem, 30.0)
    assert frontier is not None
    sharper, nearest = 0.0, float("inf")
    for option in frontier.options:
        for block, plan in option.items():
            if problem.graph.count(block) == 1:
                continue
            seconds, saved = taken(problem, plan)
            fastest, traded, untraded = lines[block]
            beyond = max((line.least - line.saved * saved) / line.recompute for line in traded)
            recomputed = max(0.0, *((line.least - line.saved * saved) / line.recompute for line in untraded))
            assert seconds >= (fastest.least_seconds + max(beyond, recomputed)) * (1 - 1e-6)
            sharper = max(sharper, (beyond - recomputed) / seconds)
            nearest = min(nearest, seconds / (fastest.least_seconds + max(0.0, beyond)))
    assert nearest < 1.06
    assert sharper > 0.005


def test_software_that_saves_other_tensors_has_no_lines() -> None:
    problem = problem_of("gpt2", 0)
    other = replace(problem, cluster=with_stack(problem.cluster, "megatron-core"))
    block = max(relax_blocks(problem), key=lambda each: len(each.recompute))
    assert traded_lines(problem, block, 1e-3, 30.0) and not traded_lines(other, block, 1e-3, 30.0)
