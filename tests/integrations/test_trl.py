"""Trainers of trl beyond the ports: a reference that is a model of its own, an adapter that goes on training, packed rows."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from support.harness.rank_pool import RankPool
from support.port_scripts import result_differences, run_after, run_before

ADAPTERS = 'peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),'
TRAINED = 'model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)'
CHANGES = {
    "a reference of its own": ("dpo_lora", "dp=2,tp=2", (ADAPTERS, "ref_model=LlamaForCausalLM(model.config),")),
    "an adapter that goes on training": (
        "dpo_lora", "dp=2,tp=2", (ADAPTERS, ""), ("args = DPOConfig", f"model = peft.get_peft_model({TRAINED})\nargs = DPOConfig")
    ),
    "packed rows": (
        "sft_lora", "", ("bf16=False", "bf16=False, packing=True, max_length=32"), ("batch_size=8", "batch_size=2")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="trl lies in a folder of its own (CONTRIBUTING.md)")
@pytest.mark.parametrize("what", CHANGES)
def test_a_trainer_is_what_it_is_on_one_process(what: str, ranks: RankPool) -> None:
    name, force, *changes = CHANGES[what]
    expected = ranks.run_alone(run_before, name, *changes, timeout=200)
    try:
        found = ranks.run(run_after, name, force, *changes, timeout=300)
    finally:
        if 4 in ranks.sets:  # ranks of other tests do without these packages
            ranks.sets.pop(4).close()
    for result in found:
        assert not result_differences(result, expected, 2e-4)  # float32 losses; Adam's first steps divide by their rounding
