"""The same question has the same answer: on one process or two, whatever the clock says, with any hash seed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import patch

import pytest
from support.models.solver_graphs import llama_graph

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Precision
from autopar.rules.registry import default_registry
from autopar.solve.bounds.flow_bound import FlowRelaxation
from autopar.solve.mesh.mesh_bounds import _MeshBound
from autopar.solve.problem.data_axis import AxisStrategies
from autopar.solve.problem.structure import structure_of
from autopar.solve.result import PlanResult
from autopar.solve.search import search
from autopar.solve.search_state import SearchState
from autopar.solve.space.options import SearchOptions

OPTIONS = SearchOptions(precision=Precision("bfloat16", "float32"), time_limit_seconds=inf)
CLUSTERS = ["dgx-h100:1", pytest.param("dgx-h100:8", marks=pytest.mark.slow), pytest.param("dgx-a100:4", marks=pytest.mark.slow)]


def answer(found: PlanResult) -> tuple[object, ...]:
    points = tuple((str(each), each.status, each.bound_seconds, each.step_seconds) for each in found.solutions)
    return found.candidate, found.evaluation, found.status, found.lower_bound_seconds, found.gap, found.cut_short, points


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_processes_and_clock_change_nothing(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate and every point of the grid too; under a clock that jumps by minutes at each look."""
    graph, devices = llama_graph(layers=32, batch=128), Cluster.parse(cluster)
    one, two = (answer(search(graph, devices, replace(OPTIONS, processes=processes))) for processes in (1, 2))
    assert one == two
    draw, now = random.Random(7), [0.0]

    def jumping() -> float:
        now[0] += draw.uniform(0.0, 300.0)
        return now[0]

    clocks = [module for name, module in sys.modules.items() if name.startswith("autopar.") and hasattr(module, "monotonic")]
    assert clocks
    for module in clocks:
        monkeypatch.setattr(module, "monotonic", jumping)
    assert answer(search(graph, devices, OPTIONS)) == one
    assert now[0] > 300.0, "the search did look at the clock"


def test_conversions_do_not_depend_on_who_reads_first() -> None:
    """A process that begins with another block has the same columns in the same order, and so the same last digits."""
    graph, mesh = llama_graph(), Mesh((Axis("dp", 2), Axis("tp", 4)))
    one, two = (structure_of(graph, mesh, AxisStrategies(graph, default_registry())) for _ in range(2))
    places = [(name, value) for name, block in one.blocks.items() for value in block.conversions]
    forwards = {(name, value): one.blocks[name].conversions[value] for name, value in places}
    backwards = {(name, value): two.blocks[name].conversions[value] for name, value in reversed(places)}
    assert forwards == backwards


def test_the_bound_of_a_copy_counts_as_the_own_one() -> None:
    """Its report has all that it solved: one more program, of the same bound, may be an ulp higher."""
    state = SearchState(llama_graph(), Cluster.parse("dgx-h100:1"), OPTIONS, lambda line: None)
    state.list_points()
    members = [each for each in state.mesh_points if each.point.mesh == Mesh((Axis("dp", 4), Axis("tp", 2)))]
    here, copied = _MeshBound(state, members), _MeshBound(state, members)
    solved = []
    copied.take(here.bound())
    for each in (here, copied):
        with patch.object(FlowRelaxation, "bound", autospec=True, return_value=1.0) as bound:
            each.sharpen(inf)
        solved.append(bound.call_count)
    assert solved[0] == solved[1]


def test_a_time_limit_says_that_it_ended_the_search() -> None:
    graph, cluster = llama_graph(layers=32, batch=128), Cluster.parse("dgx-h100:1")
    assert not search(graph, cluster, OPTIONS).cut_short
    found = search(graph, cluster, replace(OPTIONS, time_limit_seconds=0.3))
    assert found.cut_short == "the time limit of 0.3 s"


SEEDS = (("0", "1"), ("2", "2"), ("1", "2"))
"""Hash seeds, each with a number of processes."""
TINY = "gpt2-tiny --cluster dgx-h100:1 --batch 16"
LARGE = (
    "llama3-8b --cluster dgx-h100:8 --batch 128 --seq 8192 --dtype bf16",
    "mixtral-8x22b --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16",
    "deepseek-v3 --cluster dgx-h100:32 --batch 256 --seq 4096 --dtype bf16",
    "llama3-405b --cluster dgx-h100:2048 --batch 2048 --seq 8192 --dtype bf16",
    "tests/benchmarks/deep_models.py:t5_11b --cluster dgx-h100:2 --dtype bf16",
)


@pytest.mark.parametrize(
    ("words", "count"), [(TINY, 2), *(pytest.param(words, len(SEEDS), marks=pytest.mark.slow) for words in (TINY, *LARGE))]
)
def test_hash_seeds_change_no_byte_of_the_file(words: str, count: int, tmp_path: Path) -> None:
    texts = []
    for seed, processes in SEEDS[:count]:
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "autopar", "plan", *words.split(), "--no-cache", "--processes", processes]
        subprocess.run(
            [*command, "--time-limit", "3000", "-o", str(path)], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True,
        )  # fmt: skip
        texts.append(path.read_bytes())
    assert len(texts) == count and len(set(texts)) == 1
