"""Every model of the issue under forced degrees and the solver's own choice, on real processes, equals the single process."""

from __future__ import annotations

import pytest
import torch
from support.harness.end_to_end import Prepared, check_programs, plan, prepare, program, sharding_wins
from support.harness.rank_pool import RankPool
from support.models.small_models import cases

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
LIMIT_REPLICATED = 0.02


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


def check(name: str, forces: tuple[str, ...], dtype: torch.dtype, ranks: RankPool) -> None:
    """Programs for all `forces`, one after another on the same processes."""
    prepared = prepare(name, dtype)
    exact = dtype is torch.float64
    programs = texts(prepared, forces)
    check_programs(ranks, prepared, programs, forces, tolerance=1e-9 if exact else 1e-5, parameters=exact)


@pytest.mark.parametrize("name", list(cases()))
def test_equals_one_process_in_float64(name: str, ranks: RankPool) -> None:
    check(name, COVERING[name], torch.float64, ranks)


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_equals_one_process_in_float32(name: str, ranks: RankPool) -> None:
    check(name, COVERING[name], torch.float32, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", list(cases()))
def test_whole_matrix(name: str, dtype: torch.dtype, ranks: RankPool) -> None:
    check(name, tuple(FORCES), dtype, ranks)
