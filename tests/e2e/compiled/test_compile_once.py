"""Each graph is compiled by one rank of a job, and loaded by the others: counted in folders of their own."""

from __future__ import annotations

import os
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import differences
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.run_program import Case, train_compiled
from support.plans.pipeline_plans import candidate_text, pipeline_candidate

from autopar.cost_models.hardware.cluster import Cluster
from autopar.ir.plan import Pipeline, Precision
from autopar.program.build import program_text
from autopar.runtime.compat.compile import CompiledCode
from autopar.runtime.step import compiled_blocks
from autopar.runtime.step.compiled_blocks import CompileOnce, publish, published
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration

TOLERANCE = 1e-9


def train_apart(case: Case, folder: str) -> tuple[Any, int, int]:
    """On a rank, whose caches of compiled code are in a folder of its own: what a program gives, and the graphs that it compiled
    and found in a cache."""
    from torch._dynamo.utils import counters

    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{dist.get_rank()}"
    counters.clear()
    try:
        (outcome,), _ = train_compiled([case], "inductor")
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        os.environ |= {} if before is None else {"TORCHINDUCTOR_CACHE_DIR": before}
    seen = counters["aot_autograd"]
    return outcome, seen["autograd_cache_miss"], seen["autograd_cache_hit"]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "stages"), [({"dp": 2}, 1), ({"dp": 2, "tp": 2}, 1), ({}, 2)])
def test_ranks_share_what_they_compile(axes: dict[str, int], stages: int, ranks: RankPool, tmp_path: Path) -> None:
    """Also on an axis that shards tables and layers, as Megatron places them; and stages: a layer of the second one is the first
    one's. What a second start needs is in each rank's own folder."""
    prepared, world = prepare("mlp" if axes == {"dp": 2} else "llama"), prod(axes.values()) * stages
    if stages > 1:
        text = candidate_text(prepared, pipeline_candidate(prepared, axes, Pipeline(stages, 1, "1f1b"), 4))
    else:
        plan = FixedConfiguration(tp=axes.get("tp", 1), precision=Precision("float64", "float64"))
        text = program_text(prepared.graph, fixed_candidate(prepared.graph, Cluster.parse(f"local:{world}"), plan))
    case = text, prepared.state, prepared.batch
    first = ranks.run(train_apart, case, str(tmp_path), world=world, timeout=600)
    for outcome, compiled, loaded in first:
        wrong = differences(outcome, prepared.expected, TOLERANCE)
        assert not wrong, f"{wrong[:5]}\n{text}"
        assert compiled + loaded
    compilations = sum(compiled for _, compiled, _ in first)
    if stages == 1:
        assert {compiled + loaded for _, compiled, loaded in first} == {compilations}
    assert compilations < sum(compiled + loaded for _, compiled, loaded in first)
    assert not any(compiled for _, compiled, _ in ranks.run(train_apart, case, str(tmp_path), world=world, timeout=600))


def compile_twice(fails: bool) -> tuple[list[str], str]:
    """On a rank: what its compilations of one graph were, the first of which may fail; and what is said of it."""

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    once, graph, made = CompileOnce(), torch.fx.symbolic_trace(Net()), list[str]()

    def compile() -> str:
        if fails and once.store.add("compilations of the test", 1) == 1:
            raise RuntimeError("no compiler")
        return "code"

    for options in ("one", "two"):
        try:
            made.append(once(graph, (torch.zeros(2), 3), f"{options} {fails}", compile))
        except RuntimeError as error:
            made.append(str(error))
    return made, str(once).rpartition(" in ")[0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_cannot_compile_leaves_it_to_the_others(fails: bool, ranks: RankPool) -> None:
    first, second = ranks.run(compile_twice, fails, world=2, timeout=60)
    made = [*first[0], *second[0]]
    assert made.count("no compiler") == fails and made.count("code") == 4 - fails
    assert {first[1], second[1]} == ({"graphs: 2 compiled", "graphs: 1 compiled"} if fails else {"graphs: 2 compiled"})


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


def compile_on(store: Any, options: str = "") -> str:
    """Where the code of a graph comes from that is compiled over a store."""
    once = CompileOnce()
    once.store = store
    compiled = once(torch.fx.symbolic_trace(Sum()), (torch.zeros(2),), options, lambda: "code")
    return compiled + str(once).rpartition(" in ")[0].removeprefix("graphs:")


def test_code_of_any_size_goes_through_the_store() -> None:
    """A TCPStore closes the connection for a value of more than 8 MiB."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    content = os.urandom(20_000_000)
    for key, value in ("large", content), ("empty", b""), ("small", b"code"):
        publish(store, key, value)
        assert published(store.clone(), key) == value


class BrokenStore:
    """A store that refuses one kind of call."""

    def __init__(self, refused: str) -> None:
        self.store, self.refused = dist.HashStore(), refused

    def __getattr__(self, name: str) -> Any:
        if name == self.refused:
            raise dist.DistNetworkError("connection reset by peer")
        return getattr(self.store, name)


@pytest.mark.parametrize("refused", ["add", "set", "get"])
def test_a_store_that_fails_leaves_each_rank_its_own_code(refused: str) -> None:
    store = BrokenStore(refused)
    if refused == "set":
        store.store.set_timeout(timedelta(seconds=0.1))
    assert [compile_on(store), compile_on(store)] == ["code 1 compiled"] * 2


def test_a_rank_compiles_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledCode, "archive", lambda _: b"no archive")
    store = dist.HashStore()
    assert [compile_on(store), compile_on(store)] == ["code 1 compiled"] * 2


def test_where_code_comes_from_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts follow from what torch finds in its caches, and from whether a rank of this job put it there."""
    monkeypatch.setattr(CompiledCode, "archive", lambda _: b"archive")
    monkeypatch.setattr(compiled_blocks, "take_code", lambda _: None)
    hits = iter(range(100))
    store = dist.HashStore()
    assert compile_on(store, "new") == "code 1 compiled"
    monkeypatch.setattr(compiled_blocks, "cache_hits", lambda: next(hits))
    assert compile_on(store, "new") == "code 1 compiled by other ranks"
    assert [compile_on(store, "old"), compile_on(store, "old")] == ["code 1 from the cache"] * 2
