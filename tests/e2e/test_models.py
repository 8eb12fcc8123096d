"""Every model of the issue under forced degrees and the solver's own choice, on real processes, equals the single process."""

from __future__ import annotations

import os

import pytest
import torch
from support.endtoend import Prepared, differences, plan, prepare, program, run_programs, sharding_wins
from support.models import cases
from support.ranks import Ranks

FORCES: dict[str, dict[str, int]] = {
    "dp=4": {"dp": 4, "zero": 0},
    "zero=1": {"dp": 4, "zero": 1},
    "zero=2": {"dp": 4, "zero": 2},
    "zero=3": {"dp": 4, "zero": 3},
    "tp=4": {"tp": 4},
    "dp=2,tp=2": {"dp": 2, "tp": 2, "zero": 0},
    "dp=2,tp=2,zero=3": {"dp": 2, "tp": 2, "zero": 3},
    "own": {},
    "own, where sharding wins": {},
}
COVERING = {
    "gpt2": ("zero=1", "tp=4", "dp=2,tp=2,zero=3", "own, where sharding wins"),
    "llama": ("dp=4", "tp=4", "dp=2,tp=2,zero=3", "own"),
    "qwen3": ("zero=3", "dp=2,tp=2"),
    "bert": ("zero=2", "dp=2,tp=2,zero=3"),
    "vit": ("zero=3", "tp=4"),
    "mlp": ("zero=1", "dp=2,tp=2", "own, where sharding wins"),
    "convnet": ("dp=4", "tp=4"),
    "convnet_bn": ("zero=3", "dp=2,tp=2"),
}
FULL = os.environ.get("AUTOPAR_TEST_FULL") == "1"
LIMIT_REPLICATED = 0.02


def chosen(name: str) -> tuple[str, ...]:
    return tuple(FORCES) if FULL else COVERING[name]


def texts(prepared: Prepared, names: tuple[str, ...]) -> list[str]:
    """The programs; on the way, what a forced axis leaves replicated is checked."""
    out = []
    for name in names:
        result = plan(prepared, FORCES[name], sharding_wins() if "wins" in name else None)
        assert not result.warnings, (name, result.warnings)
        shares = dict(result.evaluation.redundant_share)
        for axis in FORCES[name]:
            if axis in shares and FORCES[name][axis] > 1:
                assert shares[axis] <= LIMIT_REPLICATED, f"{prepared.name}, {name}: {shares}"
        if "wins" in name:
            assert max(shares.values()) < 0.5, f"{prepared.name}: {shares}"
        out.append(program(prepared, result))
    return out


@pytest.mark.parametrize("name", list(cases()))
def test_equals_one_process_in_float64(name: str, ranks: Ranks) -> None:
    prepared = prepare(name)
    names = chosen(name)
    programs = texts(prepared, names)
    results = ranks.run(run_programs, [(text, prepared.state, prepared.batch) for text in programs], timeout=240)
    for rank in (0, 3):
        for force, text, found in zip(names, programs, results[rank], strict=True):
            wrong = differences(found, prepared.expected, 1e-9)
            assert not wrong, f"{name}, {force}, rank {rank}: {wrong[:5]}\n{text}"


@pytest.mark.parametrize("name", list(cases()) if FULL else ["gpt2", "llama"])
def test_equals_one_process_in_float32(name: str, ranks: Ranks) -> None:
    prepared = prepare(name, torch.float32)
    names = chosen(name)
    programs = texts(prepared, names)
    results = ranks.run(run_programs, [(text, prepared.state, prepared.batch) for text in programs], timeout=240)
    for force, found in zip(names, results[0], strict=True):
        wrong = differences(found, prepared.expected, 1e-5, parameters=False)
        assert not wrong, f"{name}, {force}: {wrong[:5]}"
