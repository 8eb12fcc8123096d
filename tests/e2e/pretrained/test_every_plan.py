"""Weights in Hugging Face's layout of every kind of plan: transformers' own `from_pretrained` reads them, and every other plan
does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.end_to_end import prepare
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.plans.forced_plans import forced_plan
from torch import Tensor

from autopar.program.build import program_text

State = dict[str, Tensor]
PLANS = ("dp=4,zero=3", "tp=4", "dp=2,tp=2", "pp=2,tp=2", "pp=2,dp=2,virtual=2,schedule=zbv", "ep=2,dp=2")


def differ(one: State, other: State) -> list[str]:
    """Names of tensors that are not equal bit by bit."""
    return [name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])]


def exported(texts: list[str], state: State, batch: State, folder: str) -> list[State]:
    """On a rank: each plan trains another number of steps and exports in small parts; then each loads all others'."""
    from autopar.runtime.pretrained import export as module

    module.SLICE_BYTES = 2**12
    models, saved, wrong = [], [], []
    for number, text in enumerate(texts):
        parallel = parallel_model(text, state)
        train(parallel, [batch] * (1 + number))
        parallel.save_pretrained(f"{folder}/{number}", "60KB")
        models.append(parallel)
        saved.append(parallel.full_state())
    for target, parallel in enumerate(models):
        for source in range(len(texts)):
            found = parallel.load_pretrained(f"{folder}/{source}")
            assert not found.missing_keys and not found.unexpected_keys
            wrong += [f"{source} -> {target}: {name}" for name in differ(saved[source], parallel.full_state())]
    assert not wrong, wrong[:9]
    return saved


def check(model: str, plans: tuple[str, ...], ranks: RankPool, folder: Path) -> None:
    case = prepare(model)
    texts = [program_text((plan := forced_plan(case, force)).graph, plan.candidate) for force in plans]
    saved: Any = ranks.run(exported, texts, case.state, case.batch, str(folder), timeout=60.0 + 30 * len(plans) ** 2)[0]
    from support.models.further_families import further_families
    from support.models.model_families import families
    from support.models.small_models import make_case

    plain: Any = make_case((families() | further_families())[model], torch.float64, 16)[0]
    for number, state in enumerate(saved):
        path = folder / str(number)
        assert len(list(path.glob("model-*.safetensors"))) > 2
        plain.config.save_pretrained(path)  # which a parallel model that knows its own does
        loaded, report = type(plain).from_pretrained(path, dtype=torch.float64, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"], report
        known = loaded.state_dict()
        assert not differ({name: value for name, value in state.items() if name in known}, known), plans[number]
        assert {id(value) for value in loaded.state_dict(keep_vars=True).values()} <= {
            id(value) for name, value in loaded.state_dict(keep_vars=True).items() if name in state
        }


def test_of_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    check("gpt2", PLANS[3:4], ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek_v3", "gpt2", "t5"])
def test_of_every_plan(model: str, ranks: RankPool, tmp_path: Path) -> None:
    check(model, PLANS if model == "deepseek_v3" else PLANS[:4], ranks, tmp_path)
