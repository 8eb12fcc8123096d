"""Complex buffers and products of pairs (Meta's Llama, torchtitan) train like one process, and are in checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from capture.mathematics.test_complex_pairs import KINDS, Products
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_calls
from support.harness.training_loop import train
from support.models.unseen.complex_rotary import ROWS, ComplexRotary
from support.plans.captured_models import case_of
from torch import nn

import autopar

FORCED = ({"dp": 2, "tp": 2, "zero": 3}, {"dp": 1, "tp": 4}, {"pp": 2, "dp": 2, "micro": 2})


def calls() -> list[Any]:
    return [((torch.randint(64, (8, ROWS)), torch.randint(64, (8, ROWS))), {}) for _ in range(3)]


def check(model: nn.Module, batches: list[Any], forced: tuple[dict[str, int], ...], ranks: RankPool) -> None:
    case, expected = case_of(model, batches[0][0]), train(model, batches)
    programs = [(case.text(**force), case.state, batches) for force in forced]
    for outcomes in ranks.run(train_calls, programs, timeout=120):
        for found in outcomes:
            assert not training_differences(found, expected)


def test_equals_one_process(ranks: RankPool) -> None:
    torch.manual_seed(0)
    check(ComplexRotary(torch.complex128).double(), calls(), FORCED, ranks)


def test_other_products(ranks: RankPool) -> None:
    torch.manual_seed(0)
    batches = [((torch.rand(8, 3, 8, dtype=torch.float64) + 0.1,), {}) for _ in range(2)]
    for kind in ("of two", "a conjugate", "no gradients", "gradients of one", *KINDS):
        check(Products(kind).double(), batches, FORCED[:1], ranks)


def saved_and_loaded(folder: str) -> list[float]:
    torch.manual_seed(0)
    batch, losses = calls()[0][0], []
    for force in ("dp=2,tp=2,zero=3", "dp=4,zero=1"):
        model = ComplexRotary(persistent=True)
        parallel = autopar.parallelize(model, "local:4", batch, force=force)
        if not losses:
            parallel.save(folder, step=1)
            assert parallel.state_dict()["factors"].dtype is torch.complex64
        else:
            parallel.load(folder)
            assert parallel.full_state()["factors"].equal(model.factors)
        losses.append(float(parallel(*batch).detach()))
    return losses


def test_a_table_in_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    for before, after in ranks.run(saved_and_loaded, str(tmp_path / "checkpoint")):
        assert after == pytest.approx(before, rel=1e-5)
