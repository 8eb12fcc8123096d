"""A model that is larger than what memory a process may have is loaded, trained, saved and exported under its plan."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.launch import launch
from support.harness.rank_pool import RankPool

import autopar

SCRIPT = Path(__file__).with_name("limited_script.py")


def script() -> Any:
    spec = importlib.util.spec_from_file_location("limited_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(force: str, depth: int, share: float, ranks: RankPool, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    model, x = script().Deep(depth), torch.randn(8, script().WIDTH, generator=torch.Generator().manual_seed(1))
    weights = folder / "weights"
    weights.mkdir()
    state = model.state_dict()
    save_file(state, weights / "model.safetensors")
    autopar.plan(model, "local:4", {"x": x}, force=force).save(folder / f"plan_{force.replace(',', '_')}.json")
    words = (str(folder), force, str(depth), str(share))
    [alone] = launch(ranks, SCRIPT, 1, *words)
    assert alone.status != 0 and "memory" in alone.stderr and "done" not in alone.stdout, alone
    ended = launch(ranks, SCRIPT, 4, *words, timeout=300)
    assert all(each.status == 0 for each in ended), "\n".join(each.stdout + each.stderr[-2500:] for each in ended if each.status)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in ended:
        loaded, done = (line.split() for line in each.stdout.splitlines())
        whole, allowed, block = int(loaded[2]), int(done[2]), int(loaded[2]) // depth
        assert int(loaded[1]) < whole / 4 + 6 * block + 2**25, (loaded, "of which a quarter is this rank's")
        assert int(done[1]) < allowed < whole, done
        assert abs(float(done[3]) - loss.item()) < 1e-5 * abs(loss.item())
        print(force, "peak after loading", int(loaded[1]) / whole, "in all", int(done[1]) / whole, "allowed", allowed / whole)
    said = json.loads((folder / "export" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: each for file in set(said.values()) for name, each in load_file(folder / "export" / file).items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["tp=4", "pp=4", "dp=2,tp=2,zero=3", "dp=4,zero=3"])
def test_larger_than_a_process(force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(force, 48, 0.9, ranks, tmp_path)
