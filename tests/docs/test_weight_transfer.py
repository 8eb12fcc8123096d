"""The page on weights to a generator: its scripts run as the jobs that it names."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from support.harness.end_to_end import program
from support.harness.rank_pool import RankPool
from support.harness.training_loop import parallel_model
from support.plans.bundled_cases import prepare_bundled
from support.plans.forced_plans import forced_plan

PAGE = Path(__file__).parents[2] / "docs" / "weight_transfer.md"
NETWORK = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x).relu()).square().mean()

def network():
    return Network()

def example():
    return {"x": torch.ones(4, 16)}
"""


def scripts() -> dict[str, str]:
    return dict(re.findall(r"```python\n# (\w+\.py)[^\n]*\n(.*?)```", PAGE.read_text(), re.S))


def run(text: str, folder: str, **names: Any) -> dict[str, Any]:
    """On a rank: the variables that the script leaves which are tensors by name."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        exec(text, names)
    finally:
        sys.path.remove(folder)
    model = names.get("policy", names.get("generator"))
    return names.get("parameters") if model is None else model.full_state()  # type: ignore[return-value]


def test_scripts(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(NETWORK)
    pages, folder, others = scripts(), str(tmp_path), RankPool(ranks.template)
    try:
        with ThreadPoolExecutor(2) as threads:
            sent = threads.submit(ranks.run, run, pages["trainer.py"], folder, world=2, timeout=120)
            got = threads.submit(others.run, run, pages["generator.py"], folder, world=2, timeout=120)
            for state in (*sent.result(), *got.result()):
                for name, each in sent.result()[0].items():
                    assert torch.equal(state[name], each), name
    finally:
        others.close()


def send(text: str, state: Any, address: str) -> None:
    """On a rank: what a worker receives twice."""
    parallel = parallel_model(text, state)
    parallel.send_weights(address, dtype=torch.float32)
    parallel.send_weights(address, dtype=torch.float32)


def test_worker(ranks: RankPool, tmp_path: Path) -> None:
    """The worker's script, with parameters of the shapes that it has."""
    prepared = prepare_bundled("llama-tiny")
    text, state = program(prepared, forced_plan(prepared, "dp=2,zero=3")), prepared.state
    parameters: dict[str, torch.Tensor] = {}
    for name, each in state.items():
        if "inv_freq" not in name and not re.search("[kv]_proj|up_proj", name):
            fused = {"q_proj": ("qkv", 3), "gate_proj": ("gate_up", 2)}.get(name.split(".")[-2])
            rows = sum(len(state[name.replace("q_proj", f"{p}_proj").replace("gate_proj", f"{p}_proj")]) // 2
                       for p in {"qkv": "qkv", "gate_up": ("gate", "up")}[fused[0]]) if fused else 0  # fmt: skip
            shape = [rows, each.shape[1]] if fused else list(each.shape)
            shape[1 if re.search("o_proj|down_proj", name) else 0] //= 2 if re.search("o_proj|down|embed|lm_head", name) else 1
            parameters[re.sub("q_proj", "qkv_proj", re.sub("gate_proj", "gate_up_proj", name))] = torch.zeros(shape)
    others = RankPool(ranks.template)
    try:
        with ThreadPoolExecutor(3) as threads:
            sent = threads.submit(ranks.run, send, text, state, "localhost:29778", world=2, timeout=120)
            got = [threads.submit(others.run_alone, run, scripts()["worker.py"], str(tmp_path), parameters=parameters, rank=rank)
                   for rank in range(2)]  # fmt: skip
            sent.result()
            name = "model.norm.weight"
            assert all(torch.equal(each.result()[name], state[name].float()) for each in got)
    finally:
        others.close()


def test_plan_of_a_transfer(tmp_path: Path) -> None:
    import autopar
    from autopar.capture.models import load_model

    loaded = load_model("llama-tiny", 16, None, "float32", device="cpu")
    plan = autopar.plan(loaded.model, "local:2", loaded.example_inputs, force="dp=2,zero=3")
    plan.save(tmp_path / "trainer.json")
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        exec(scripts()["transfer.py"], {})
    finally:
        os.chdir(before)
    receivers = autopar.plan(loaded.model, "local:2", loaded.example_inputs, force="tp=2,dp=1")
    found = autopar.plan_weight_transfer(plan, receivers)
    assert found.nbytes == found.lower_bound_bytes and found.sizes == (2, 2)
