"""A model that is larger than what memory a process may have is loaded, trained, saved and exported under its plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from e2e.pretrained import limited_script
from support.harness.launch import launch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import sgd, train

import autopar

SCRIPT = Path(__file__).with_name("limited_script.py")


def check(force: str, depth: int, share: float, ranks: RankPool, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    model, x = limited_script.Deep(depth), torch.randn(8, limited_script.WIDTH, generator=torch.Generator().manual_seed(1))
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
    loss = train(model, [{"x": x}] * 2, sgd(1e-3)).losses[-1]
    for each in ended:
        loaded, done = (line.split() for line in each.stdout.splitlines())
        whole, allowed, block = int(loaded[2]), int(done[2]), int(loaded[2]) // depth
        assert int(loaded[1]) < whole / 4 + 6 * block + 2**25, (loaded, "of which a quarter is this rank's")
        assert int(done[1]) < allowed < whole, done
        assert abs(float(done[3]) - loss) < 1e-5 * abs(loss)
        print(force, "peak after loading", int(loaded[1]) / whole, "in all", int(done[1]) / whole, "allowed", allowed / whole)
    said = json.loads((folder / "export" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {name: each for file in set(said.values()) for name, each in load_file(folder / "export" / file).items()}
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["tp=4", "pp=4", "dp=2,tp=2,zero=3", "dp=4,zero=3"])
def test_larger_than_a_process(force: str, ranks: RankPool, tmp_path: Path) -> None:
    check(force, 48, 0.9, ranks, tmp_path)
