"""Programs that are changed in one place: the checker refuses every one that is wrong on ranks (which run in lockstep), and none
of the originals. ``AUTOPAR_MUTANTS=170`` takes so many of each program."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from checker.lockstep import run_in_lockstep
from checker.mutants import mutants
from support.models.model_families import families
from support.models.small_models import cases, long_cases, make_case, routed_cases
from support.oracles.interpret_graph import loss_and_gradients, make_batch, make_state
from support.plans.drawn_candidates import drawn_candidate

from autopar.capture import capture
from autopar.checker.certificate import certify
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Candidate
from autopar.program.build import program_text
from autopar.verification.single import lift_casts

COUNT = int(os.environ.get("AUTOPAR_MUTANTS", "0"))
FAST, SLOW = (
    ("mlp", "gpt2"),
    ("llama", "bert", "mixtral", "convnet", "routed", "gemma2", "opt", "encoder_decoder", "gpt_neox", "qwen3"),
)
MESHES = (
    Mesh((Axis("dp", 2), Axis("tp", 2))),
    Mesh((Axis("dp", 1), Axis("tp", 4))),
    Mesh((Axis("dp", 2), Axis("tp", 2), Axis("tp2", 2))),
)


@cache
def graph_of(name: str) -> Graph:
    models = families() | cases() | long_cases() | routed_cases()
    model, inputs = make_case(models[name], torch.float64, 16)
    return lift_casts(capture(model, (), inputs, compute_dtype="float64"))


def programs(graph: Graph, seeds: range) -> Iterator[tuple[int, Candidate, str]]:
    """Programs of drawn placements, every third in two micro-batches where the model can."""
    for seed in seeds:
        candidate = drawn_candidate(graph, MESHES[seed % 3], seed, wild=(0.0, 0.3)[seed % 2])
        if seed % 3 == 0:
            try:
                text = program_text(graph, replace(candidate, micro_batches=2))
                yield seed, replace(candidate, micro_batches=2), text
                continue
            except PlanError:
                pass
        yield seed, candidate, program_text(graph, candidate)


def why_wrong(text: str, state: Any, batch: Any, loss: float, gradients: dict[str, torch.Tensor]) -> str:
    """What ranks do wrong, in a few words; empty where they compute what one process does."""
    try:
        losses, found = run_in_lockstep(text, state, batch)
    except Exception as error:  # noqa: BLE001  whatever a wrong program runs into
        return f"raises {type(error).__name__}: {str(error)[:80]}"
    if any(abs(each - loss) > 1e-9 * max(1.0, abs(loss)) for each in losses):
        return f"a loss of {losses}, not {loss}"
    if found.keys() != gradients.keys():
        return "other parameters"
    noise = 1e-6 * max(each.abs().max().item() for each in gradients.values())
    for name, copies in found.items():
        for each in copies:
            scale = max(gradients[name].abs().max().item(), noise)
            if each.shape != gradients[name].shape or (each - gradients[name]).abs().max().item() > 1e-7 * scale:
                return f"the gradient of {name}"
    return ""


def check(name: str, seeds: range, count: int) -> Counter[str]:
    graph = graph_of(name)
    state, batch = make_state(graph), make_batch(graph, 8)
    loss, gradients = loss_and_gradients(graph, state, batch)
    tally = Counter[str]()
    for seed, candidate, text in programs(graph, seeds):
        original = certify(text, graph, candidate)
        assert original.holds, f"{name}, seed {seed}: {original.line()}"
        assert not why_wrong(text, state, batch, loss, gradients), f"{name}, seed {seed}: the original"
        for kind, mutant in mutants(text, seed, count):
            if not certify(mutant, graph, candidate).holds:
                tally["refused"] += 1
                continue
            why = why_wrong(mutant, state, batch, loss, gradients)
            assert not why, f"{name}, seed {seed}: {kind} is taken for right, and has {why}\n{_difference(text, mutant)}"
            tally["right"] += 1
    return tally


def _difference(text: str, mutant: str) -> str:
    pairs = zip(text.splitlines(), mutant.splitlines(), strict=False)
    return next((f"{a.strip()}\n{b.strip()}" for a, b in pairs if a != b), "")


@pytest.mark.parametrize("name", FAST)
def test_mutants(name: str) -> None:
    tally = check(name, range(3), 20)
    assert tally["refused"] > 40


@pytest.mark.slow
@pytest.mark.parametrize("name", (*FAST, *SLOW))
def test_two_thousand_mutants(name: str) -> None:
    tally = check(name, range(6), COUNT or 30)
    print(name, dict(tally))
    assert tally["refused"] > 5 * tally["right"]
