"""`dryrun --measure`: one rank on real tensors, alone, takes what the same rank takes among the others."""

from __future__ import annotations

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.harness.rank_pool import RankPool

import autopar
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster

HIDDEN_STATES_BYTES = 4 * 16 * 16 * 64  # of gpt2-tiny with 16 sequences of 16 tokens: what tensor parallelism reduces


@cache
def plan_of(name: str, seq: int | None, force: str, batch: int) -> Any:
    loaded = load_model(name, None, seq)
    return autopar.plan(loaded.model, Cluster.parse("local:2"), loaded.example_inputs, force=force, name=name, batch=batch)


def alone(path: str, rank: int, steps: int) -> dict[str, Any]:
    """In a process of its own."""
    from autopar.dryrun.real_kernels import measure_rank
    from autopar.dryrun.run import dry_run
    from autopar.ir.plan_file.plan_file import load_plan

    logging.disable(logging.WARNING)
    plan = load_plan(path)
    found = measure_rank(plan, rank, steps)
    return {"peak": found.peak_bytes, "fake": dry_run(plan, rank).peak_bytes, "measured": found.measured}


def among_others(path: str, steps: int) -> dict[str, Any]:
    """On each rank of the plan."""
    import torch

    from autopar.dryrun.run import make_optimizer
    from autopar.ir.plan_file.plan_file import load_plan
    from autopar.passes.lower import lower
    from autopar.program.build import build_program
    from autopar.program.export import random_batch
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel
    from autopar.runtime.step.inputs import NamedBatch

    plan = load_plan(path)
    program_class = build_program(plan.graph, plan.candidate).Program
    program = program_class(MeshHandle(program_class.mesh_axes))
    specs = {b.original_names[s.path]: s for stage in program.roots() for root in stage for b in root.blocks() for s in b.specs}
    generator = torch.Generator().manual_seed(0)
    parallel = Parallel(program, lambda name: torch.randn(specs[name].shape, generator=generator) * 0.02, check_batch_every=0)
    optimizer = make_optimizer("adamw", parallel, False)
    batch = random_batch(lower(plan.graph, plan.candidate))

    def train(count: int) -> None:
        for _ in range(count):
            parallel(NamedBatch(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(1)
    parallel.measure(steps)
    train(steps + 1)
    found = parallel.report().measured
    return {"measured": found, "stage": program.mesh.pp.coordinate}


def peak_of(measured: dict[str, Any], stage: int) -> int:
    (memory,) = [each for each in measured["memory"] if each["stage"] == stage]
    return int(memory["peak_bytes"])


@pytest.mark.parametrize("force", ["pp=2", "dp=2,zero=3", "tp=2"])
def test_memory_is_that_of_the_rank(force: str, ranks: RankPool, tmp_path: Path) -> None:
    """The allocator's bytes, alone and among the others; a dry run on fake tensors sees no gradients that are summed in place."""
    path = str(tmp_path / "plan.json")
    plan_of("gpt2-tiny", None, force, 16).save(path)
    real = ranks.run(among_others, path, 1, world=2)
    for rank in (0, 1) if force == "pp=2" else (1,):
        found = ranks.run_alone(alone, path, rank, 1)
        held = HIDDEN_STATES_BYTES if force == "tp=2" else 0  # seen once: presumably gloo still held it
        measured = peak_of(real[rank]["measured"], real[rank]["stage"])
        assert 0.99 * found["peak"] <= measured <= 1.01 * found["peak"] + held
        assert 0.85 * found["fake"] <= found["peak"] <= 1.05 * found["fake"]


def test_the_command(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    plan_of("gpt2-tiny", None, "pp=2", 16).save(path)
    said = ranks.run_alone(command, ["dryrun", path, "--measure", "--rank", "1", "--json"])
    document = json.loads(said)
    assert (document["rank"], document["stage"], document["device"]) == (1, 1, "cpu")
    assert document["compute"]["both"]["measured"] > 0 < document["compute"]["both"]["predicted"]
    text = ranks.run_alone(command, ["dryrun", path, "--measure"])
    assert "Computing time of a step" in text and "GPT2Block" in text and "peak of all tensors" in text


def command(words: list[str]) -> str:
    """What the script ``autopar`` prints."""
    import contextlib
    import io

    from autopar.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(words) == 0
    return said.getvalue()


@pytest.mark.slow
def test_a_stage_of_gpt2_takes_what_it_takes_in_the_real_run(ranks: RankPool, tmp_path: Path) -> None:
    """Processor time of the least of several steps, since other programs share the cores; both in turn, twice."""
    path = str(tmp_path / "plan.json")
    plan_of("gpt2", 128, "pp=2", 4).save(path)
    real: dict[int, list[float]] = {0: [], 1: []}
    dry: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(2):
        found = ranks.run(among_others, path, 4, world=2, timeout=500)
        for rank in (0, 1):
            one = ranks.run_alone(alone, path, rank, 4, timeout=500)
            dry[rank].append(one["measured"]["stages"][0]["least_processor_seconds"])
            (row,) = [each for each in found[rank]["measured"]["stages"] if each["stage"] == rank]
            real[rank].append(row["least_processor_seconds"])
            peak = peak_of(found[rank]["measured"], rank)
            print(f"rank {rank}: peak {one['peak']} alone, {peak} in the real run, {one['fake']} on fake tensors")
            assert one["peak"] == pytest.approx(peak, rel=0.05)
    for rank in (0, 1):
        print(f"rank {rank}: {min(dry[rank]):.3f} s alone, {min(real[rank]):.3f} s in the real run")
        assert min(dry[rank]) == pytest.approx(min(real[rank]), rel=0.15)
