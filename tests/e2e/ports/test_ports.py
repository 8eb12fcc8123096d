"""The scripts of examples/ports on four ranks, beside the same scripts without the lines that are autopar's on one process."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.harness.rank_pool import RankPool
from support.port_scripts import Result, changed_lines, names, result_differences, run_after, run_before

PAGE = Path(__file__).parents[3] / "docs" / "ports.md"
QUICK = ("ddp", "gan", "padded")
PIPELINES = (
    "accelerate_loop", "checkpointing", "ddp", "lightning_module", "lora_loop", "lora_trainer", "muon", "nanogpt", "packed",
    "padded", "trainer", "vision_language",
)  # fmt: skip
"""Those whose loss is inside of the model."""
PLANS = {"dp=2,tp=2": names(), "": names(), "pp=2,dp=2": PIPELINES}
PACKAGES = {
    "trainer": "transformers", "lora_trainer": "peft", "lora_loop": "peft", "accelerate_loop": "accelerate",
    "lightning_module": "lightning", "sft_lora": "trl", "dpo_lora": "trl",
}  # fmt: skip
OWN_GROUP = ("ddp",)
TOLERANCES = {
    "resnet_autocast": 0.05,  # bfloat16
    "muon": 0.02,  # its iterations are in bfloat16
    "trainer": 1e-5,  # transformers computes losses, and llama its norms, in float32
    "lora_trainer": 1e-5,
    "lora_loop": 1e-5,
    "sft_lora": 1e-5,
    "dpo_lora": 1e-5,
}


@cache
def one_process(name: str, ranks: RankPool) -> Result:
    if name in OWN_GROUP:
        found: Result = ranks.run(run_before, name, world=1)[0]
        ranks.sets.pop(1).close()
        return found
    return ranks.run_alone(run_before, name, timeout=120)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("force", "name"),
    [
        pytest.param(force, name, marks=() if force == "dp=2,tp=2" and name in QUICK else pytest.mark.slow)
        for force, ports in PLANS.items()
        for name in ports
    ],
)
def test_a_port_is_what_it_was_on_one_process(force: str, name: str, ranks: RankPool) -> None:
    if name in PACKAGES and find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is an optional extra")
    expected = one_process(name, ranks)
    try:
        found = ranks.run(run_after, name, force, timeout=300)
    finally:
        if name in PACKAGES and 4 in ranks.sets:  # ranks of other tests do without these packages
            ranks.sets.pop(4).close()
    for rank, result in enumerate(found):
        wrong = result_differences(result, expected, TOLERANCES.get(name, 1e-9))
        assert not wrong, (rank, wrong[:3])


def test_the_page_counts_the_changed_lines() -> None:
    rows = dict(re.findall(r"^\| \[`(\w+)\.py`\]\(.*\| (\d+) \|", PAGE.read_text(), re.MULTILINE))
    assert {name: int(count) for name, count in rows.items()} == {name: changed_lines(name) for name in names()}
