"""FSDP2's reduce dtype: gradients are rounded to it, summed over the data ranks, and kept in the dtype of the parameters."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import autopar
from autopar.errors import PlanError
from autopar.ir.plan import Precision
from autopar.ir.plan_file.plan_file import load_plan

BATCH, WIDTH = 8, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum() / (BATCH * WIDTH)


def inputs() -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rounded_sum(shards: int) -> dict[str, Tensor]:
    """Of the gradients of equal parts of the batch, rounded to float32."""
    model, total = Net(), dict[str, Tensor]()
    for part in inputs().chunk(shards):
        model.zero_grad()
        model(part).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            total[name] = total[name] + parameter.grad.float() if name in total else parameter.grad.float()
    return {name: each.double() for name, each in total.items()}


def script(cases: list[tuple[str, int]]) -> None:
    model = Net()
    model(inputs()).backward()
    exact = {name: parameter.grad for name, parameter in model.named_parameters()}
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for force, shards in cases:
        with warnings.catch_warnings(action="ignore"):
            parallel = autopar.parallelize(
                Net(), "local:4", (inputs(),), precision=policy, force=force, cache=False
            )  # fmt: skip
        assert parallel.plan.candidate.precision == Precision("float64", "float64", reduce="float32")
        parallel(inputs()).backward()
        found = dict(parallel.full_gradients())
        near = rounded_sum(shards) if shards else exact
        for name, gradient in found.items():
            assert gradient.dtype is torch.float64
            far = float((gradient - near[name]).abs().max() / near[name].abs().max())
            off = float((gradient - exact[name]).abs().max() / exact[name].abs().max())
            assert far < (1e-12 if shards else 1e-6) and 1e-10 < off < 1e-6, (force, name, far, off)


EXACT = "pp=1,zero={},micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0"


def test_gradients_are_summed_in_it(ranks: RankPool) -> None:
    """Under replicated state and ZeRO exactly the sum of rounded gradients; with micro-batches it is rounded too."""
    ranks.run(script, [("tp=2," + EXACT.format(0), 2), ("tp=2," + EXACT.format(3), 2)])


@pytest.mark.slow
def test_under_every_plan(ranks: RankPool) -> None:
    cases = [(f"tp=2,{EXACT.format(zero)}", 2) for zero in (1, 2)]
    others = [
        "dp=4,zero=3",
        "dp=4,zero=1,micro=1",
        "dp=4,zero=2,micro=1",
        "dp=4,zero=3,zero_group=2",
        "pp=2,dp=2",
        "pp=2,dp=2,zero=3",
    ]
    ranks.run(script, [*cases, *((force, 0) for force in others)], timeout=400)


def test_it_is_part_of_the_plan(tmp_path: Path) -> None:
    """Written, read, in the program's text, on the wire; another word is refused."""
    options: dict[str, Any] = dict(force=EXACT.format(3) + ",tp=1")
    with warnings.catch_warnings(action="ignore"):
        whole, half = (
            autopar.plan(Net().float(), "local:4", (inputs().float(),), precision=Precision(reduce=dtype), **options)
            for dtype in ("", "bfloat16")
        )
    half.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").candidate.precision == Precision(reduce="bfloat16")
    assert 'reduce_dtype = "bfloat16"' in autopar_text(half) and "reduce_dtype = " not in autopar_text(whole)
    document = json.loads((tmp_path / "plan.json").read_text())
    document["precision"]["reduce"] = "int7"
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    with pytest.raises(PlanError, match="int7"):
        load_plan(tmp_path / "wrong.json")


def autopar_text(plan: Any) -> str:
    from autopar.program.build import program_text

    return program_text(plan.graph, plan.candidate)
