"""`autopar verify` of the kinds of models that people bring: what is random, dropout, batch norm, many results, mixed dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.zoo import common_kinds

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.plan_file.plan_file import Plan
from autopar.planning import make_plan
from autopar.precision import precision_of
from autopar.verification.proof import Job, Proof, Subject, prove, run_reference, subject
from autopar.verification.rank import make_runs

CLUSTER = "local:4"


@cache
def planned(name: str, dtype: str, force: str) -> tuple[Subject, Plan]:
    torch.manual_seed(0)
    model, example = common_kinds.FACTORIES[name]()
    chosen = precision_of(dtype, model)
    whole = subject(model, example, chosen.compute, chosen.master)
    run_reference(whole)
    return whole, make_plan(model, CLUSTER, example, precision=dtype, force=force, graph=whole.graph)


def proof_of(
    ranks: RankPool, name: str, dtype: str = "float64", force: str = "dp=2,tp=2", tamper: Callable[[Job], None] | None = None
) -> Proof:
    def launch(job: Job, devices: int) -> list[dict[str, Any]]:
        if tamper is not None:
            tamper(job)
        found: list[dict[str, Any]] = ranks.run(make_runs, job, world=devices)[0]
        return found

    whole, plan = planned(name, dtype, force)
    return prove(whole, plan, Cluster.parse(CLUSTER), lambda line: None, launch)


def whys(proof: Proof) -> list[Any]:
    return [(mode.left_out, mode.departs, [each for each in mode.differences if not each.equal][:3]) for mode in proof.modes]


SHORT = ("nanogpt", "vae", "patchtst")
DRAWS = {"convnext": 2, "nanogpt": 5, "vae": 1, "mae": 1, "dit": 3, "swin": 8, "deeplab": 1, "patchtst": 3, "mixed": 0}


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in common_kinds.FACTORIES]
)
def test_models_that_people_bring(name: str, ranks: RankPool) -> None:
    """In training and in evaluation, each to 1e-9: losses, outputs, gradients, parameters and buffers after a step."""
    proof = proof_of(ranks, name, force="dp=4" if name == "deeplab" else "dp=2,tp=2")
    assert [mode.training for mode in proof.modes] == [True, False]
    assert proof.equal and not any(mode.left_out for mode in proof.modes), whys(proof)
    assert proof.modes[0].draws == DRAWS[name]
    kinds = {each.what for each in proof.modes[0].differences}
    assert {"loss", "gradients", "parameters"} <= kinds
    assert ("buffers" in kinds) == (name in ("deeplab", "patchtst"))
    assert ("outputs" in kinds) == (name == "deeplab")
    assert all(each.allowed == 1e-9 for mode in proof.modes for each in mode.differences)


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=4,zero=3", "pp=2,dp=2,micro=2", "tp=4"])
@pytest.mark.parametrize("name", ["nanogpt", "swin"])
def test_of_other_plans(name: str, force: str, ranks: RankPool) -> None:
    proof = proof_of(ranks, name, force=force)
    assert proof.equal and not any(mode.left_out for mode in proof.modes), whys(proof)


def test_rounding_of_float32_is_the_models_own(ranks: RankPool) -> None:
    proof = proof_of(ranks, "convnext", "float32")
    assert proof.exact and proof.equal, whys(proof)
    every = [each for mode in proof.modes for each in mode.differences]
    assert any(each.rounding > 0 for each in every)
    assert all(each.allowed >= max(1e-5, 4 * each.rounding) for each in every)


def test_the_first_output_that_departs_is_named(ranks: RankPool) -> None:
    def tamper(job: Job) -> None:
        job["state"]["layers.1.mlp.0.weight"] = 1.01 * job["state"]["layers.1.mlp.0.weight"]

    proof = proof_of(ranks, "nanogpt", tamper=tamper)
    assert not proof.equal
    for mode in proof.modes:
        assert mode.departs.startswith("the output of layers.1.mlp.0 (common_kinds.py:"), mode.departs
        assert "is the first that departs, by " in mode.departs and "\n" not in mode.departs


def test_the_first_gradient_that_departs_is_named(ranks: RankPool) -> None:
    def tamper(job: Job) -> None:
        for run in job["runs"]:
            assert "F.gelu(" in run["program"]
            run["program"] = re.sub(r"F\.gelu\((\w+)", r"F.gelu(\1.detach()", run["program"])

    proof = proof_of(ranks, "nanogpt", tamper=tamper)
    training, evaluation = proof.modes
    assert not training.equal and evaluation.equal
    assert training.departs.startswith("the gradient of layers.1.mlp.0."), training.departs
    assert "the outputs of all modules agree" in training.departs


class Cancels(torch.nn.Module):
    """Two sums of the same numbers in another order: their difference, and the gradient of its scale, is rounding on any CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 256), torch.nn.Linear(256, 4)
        self.scale = torch.nn.Parameter(torch.full((256,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        rounding = y.sum(-1, keepdim=True) - (x @ self.up.weight.sum(0) + self.up.bias.sum()).unsqueeze(-1)
        return self.down(y.relu() + self.scale * (1e9 * rounding)).square().mean()


@pytest.mark.parametrize("tampered", [False, True])
def test_what_one_process_cannot_keep_itself_counts_as_equal(tampered: bool, ranks: RankPool) -> None:
    def launch(job: Job, devices: int) -> list[dict[str, Any]]:
        if tampered:
            job["state"]["down.bias"] = job["state"]["down.bias"] * (1 + 1e-6)
        found: list[dict[str, Any]] = ranks.run(make_runs, job, world=devices)[0]
        return found

    torch.manual_seed(0)
    example = (torch.randn(8, 16).double(),)
    whole = subject(Cancels().double(), example, "float64", "float64")
    run_reference(whole)
    plan = make_plan(whole.model, CLUSTER, example, precision="float64", force="dp=2,tp=2", graph=whole.graph)
    proof = prove(whole, plan, Cluster.parse(CLUSTER), lambda line: None, launch)
    assert proof.equal != tampered, whys(proof)
    assert proof.modes[0].unsteady != tampered
    steady = [each for each in proof.modes[0].differences if each.name in ("loss", "down.bias")]
    assert steady and all(each.allowed < 1e-6 for each in steady)


class Unlike(torch.nn.Linear):
    """Draws on one process what its capture does not know of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or x.is_meta:
            return (super().forward(x) * torch.rand_like(x)).square().mean()
        return (super().forward(x) * 0.5).square().mean()


def test_draws_that_both_sides_cannot_have_are_refused_before_the_search() -> None:
    whole = subject(Unlike(8, 8), (torch.randn(4, 8),), "float32", "float32")
    with pytest.raises(AutoparError, match=r"test_verification.py:\d+: the model on one process draws no numbers") as caught:
        run_reference(whole)
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_itself_is_said_before_the_search(tmp_path: Path) -> None:
    class Fails(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x.is_meta and type(x) is torch.Tensor and not torch.compiler.is_compiling():
                raise RuntimeError("no\nluck")
            return super().forward(x).sum()

    whole = subject(Fails(8, 8), (torch.randn(4, 8),), "float32", "float32")
    with pytest.raises(AutoparError, match="Fails itself fails on one process .* no luck; mend the model") as caught:
        run_reference(whole)
    assert "\n" not in str(caught.value)
