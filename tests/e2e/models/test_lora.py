"""LoRA by peft on real ranks: only adapters get gradients and state, and they are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support.harness.comparison import training_differences
from support.harness.end_to_end import plan
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model, train
from support.models.lift_casts import LiftedCasts, lift_graph
from support.models.small_models import make
from support.plans.captured_models import Case, case_of
from torch import Tensor, nn


@cache
def adapted(name: str) -> tuple[nn.Module, Case, dict[str, Tensor], Any]:
    """The model with adapters, its case, batch, and what one process makes of three steps."""
    peft = pytest.importorskip("peft")
    model, batch = make(name, torch.float64, 8)
    torch.manual_seed(1)
    targets = {"gpt2": ["c_attn", "c_proj"], "llama": ["q_proj", "v_proj", "down_proj"]}[name]
    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
    model = peft.get_peft_model(model, config).double()
    case = case_of(model, (), batch)
    with LiftedCasts():
        expected = train(model, [((), batch)] * 3)
    return model, Case(lift_graph(case.graph), case.state), batch, expected


def adapters_only(text: str, state: dict[str, Tensor], batch: dict[str, Tensor]) -> Any:
    """On a rank: training, the names that an optimizer has state of, and whether frozen parameters take part in anything."""
    parallel = parallel_model(text, state)
    found = train(parallel, [((), batch)] * 3)
    optimizer = torch.optim.AdamW(p for p in parallel.parameters() if p.requires_grad)
    parallel(**batch).backward()
    optimizer.step()
    names = {parameter: name for name, parameter in parallel.named_parameters()}
    frozen = [name for parameter, name in names.items() if not parameter.requires_grad and parameter.grad is not None]
    return found, sorted(names[parameter] for parameter in optimizer.state), frozen


@pytest.mark.parametrize(
    ("name", "force"),
    [
        ("gpt2", {"dp": 2, "tp": 2, "zero": 3, "pp": 1}),
        pytest.param("gpt2", {"dp": 2, "tp": 2, "zero": 0, "pp": 1}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2, "tp": 2, "zero": 3, "pp": 1}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp": 2, "dp": 2, "zero": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_only_adapters_train(name: str, force: dict[str, int], ranks: RankPool) -> None:
    model, case, batch, expected = adapted(name)
    trainable = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable and all("lora_" in each for each in trainable)
    mine: set[str] = set()
    for found, with_state, frozen in ranks.run(adapters_only, case.text(**force), case.state, batch, timeout=120):
        assert not training_differences(found, expected) and found[1].keys() == trainable and not frozen
        mine |= set(with_state)
    assert mine == trainable


@pytest.mark.slow
def test_frozen_state_is_priced_as_such() -> None:
    """Beside the same model that trains everything: no moments and no gradients of what is frozen."""
    model, case, batch, _ = adapted("gpt2")
    free = make("gpt2", torch.float64, 8)[0]
    whole = case_of(free, (), batch)
    lora, full = (plan(each, {"dp": 4, "tp": 1, "zero": 0, "pp": 1}).evaluation for each in (case, whole))  # type: ignore[arg-type]
    frozen = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    assert full.peak_memory_bytes - lora.peak_memory_bytes > 1.5 * frozen
