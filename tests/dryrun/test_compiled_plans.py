"""Whether a plan is priced as compiled, and runs so."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cli.evaluation import evaluation_of
from autopar.cost_models.hardware.bottleneck import bottleneck_device
from autopar.cost_models.hardware.cluster import Cluster, with_tuned_rates
from autopar.cost_models.hardware.software_stacks import with_compilation, with_stack
from autopar.cost_models.hardware.stack_entries import TunedRates
from autopar.cost_models.step.evaluate import evaluate
from autopar.given_plan import compiler_of, priced_as
from autopar.ir.plan_file.plan_file import Plan
from autopar.planning import make_plan
from autopar.program.templates import TRAIN

GPUS = "dgx-h100:1"


def planned(model: str, cluster: Cluster | str, compile: bool | None = None, batch: int = 16) -> Plan:
    loaded = load_model(model, batch)
    return make_plan(loaded.model, cluster, loaded.example_inputs, precision="bf16", force="tp=1,zero=2", compile=compile)


def is_compiled(plan: Plan) -> bool:
    return bool(plan.document.cluster.description["device"]["fused"])


def test_on_gpus() -> None:
    assert is_compiled(planned("gpt2-tiny", GPUS))
    assert not is_compiled(planned("gpt2-tiny", "local:2"))
    assert is_compiled(planned("mixtral-tiny", GPUS))


def test_as_it_is_asked_for() -> None:
    eager, compiled = planned("gpt2-tiny", GPUS, False), planned("gpt2-tiny", GPUS, True)
    assert not is_compiled(eager) and is_compiled(compiled)
    assert compiled.document.predicted.step_seconds < eager.document.predicted.step_seconds
    assert is_compiled(planned("mixtral-tiny", GPUS, True)) and is_compiled(planned("gpt2-tiny", "local:2", True))


def test_measured_fractions_stay() -> None:
    """Those of a preset are the ones of our programs, eager or compiled; and back again."""
    preset = Cluster.parse(GPUS)
    compiled = with_compilation(preset, True)
    assert compiled.device.matmul_fraction > preset.device.matmul_fraction
    assert with_compilation(compiled, False) == preset
    measured = replace(preset, device=replace(preset.device, matmul_fraction=0.7))
    assert with_compilation(measured, True).device == replace(measured.device, fused=True)
    mixed = with_compilation(Cluster.parse("dgx-h100:1+dgx-a100:1"), True)
    assert mixed.device.fused and all(group.device.fused for group in mixed.groups)


@pytest.mark.parametrize("other", ["dgx-h100:1", "dgx-a100:1"])
def test_groups_reach_what_their_devices_reach_alone(other: str) -> None:
    both = Cluster.parse(f"dgx-h100:1+{other}")
    mixed = with_compilation(both, True)
    alone = tuple(with_compilation(Cluster.parse(each), True).device for each in ("dgx-h100:1", other))
    assert tuple(group.device for group in mixed.groups) == alone
    assert mixed.device == bottleneck_device(list(alone)) and with_compilation(mixed, False) == both


@pytest.mark.parametrize("software", ["nemo-megatron-core", "torchtitan"])
def test_other_software_reaches_on_groups_what_it_reaches_alone(software: str) -> None:
    mixed = with_stack(Cluster.parse("dgx-h100:1+dgx-a100:1"), software)
    alone = [with_stack(Cluster.parse(each), software) for each in ("dgx-h100:1", "dgx-a100:1")]
    assert [group.device for group in mixed.groups] == [each.device for each in alone]
    assert [group.links for group in mixed.groups] == [each.links for each in alone]
    assert mixed.device == bottleneck_device([each.device for each in alone])


def test_shares_that_steps_reached_are_those_of_compiled_programs_too() -> None:
    """``autopar tune`` compares steps of compiled plans with prices of such, and writes the shares of both."""
    preset, shares = Cluster.parse(GPUS), TunedRates(0.7, 0.8)
    tuned = with_compilation(with_tuned_rates(preset, shares), True)
    wanted = with_tuned_rates(with_compilation(preset, True), shares)
    for name in ("matmul_fraction", "bandwidth_fraction", "attention_fraction"):
        assert getattr(tuned.device, name) == pytest.approx(getattr(wanted.device, name))
    assert tuned.links == wanted.links and tuned.device.fused


def test_runs_as_it_is_priced_on_gpus_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, compiled = planned("gpt2-tiny", GPUS, False), planned("gpt2-tiny", GPUS)
    assert compiler_of(compiled, None) is False, "there are no GPUs"
    assert compiler_of(eager, "aot_eager") == "aot_eager" and compiler_of(compiled, False) is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    found: list[Any] = [None]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found[0])
    with pytest.warns(UserWarning, match="pip install triton"):
        assert compiler_of(compiled, None) is False
    found[0] = "triton"
    assert compiler_of(compiled, None) is True and compiler_of(eager, None) is False
    with pytest.warns(UserWarning, match="more memory"):
        assert compiler_of(compiled, False) is False


@pytest.mark.parametrize(("priced", "gpus", "triton"), [*itertools.product((False, True), repeat=3)])
def test_an_exported_script_compiles_where_it_can(
    priced: bool, gpus: bool, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default of its ``--compile``: without Triton inductor would fail in the first step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "found" if triton and name == "triton" else None)
    script = ast.parse(TRAIN.format(learning_rate=1, ranks=1, compiled=priced))
    (main_function,) = [each for each in script.body if isinstance(each, ast.FunctionDef) and each.name == "main"]
    lines = [
        each
        for each in main_function.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) in ("able", "compiled")
    ]
    names: dict[str, Any] = {"torch": torch, "importlib": importlib}
    exec(compile(ast.Module(lines, []), "train.py", "exec"), names)
    assert names["compiled"] is (priced and gpus and triton)


def test_a_dry_run_compares_what_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks without compilation, which save more than the plan says of compiled ones; of a batch whose activations are most."""
    plan = planned("llama-tiny", GPUS, batch=64)
    plan.save(path := tmp_path / "plan.json")
    eager = evaluation_of(priced_as(plan, compiled=False))
    assert eager is not None and eager.peak_memory_bytes > (plan.document.predicted.peak_memory_bytes or 0)
    assert eager.step_seconds == evaluate(plan.graph, plan.candidate, Cluster.parse(GPUS)).step_seconds
    assert main(["dryrun", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)


def test_compiled_plans_offload_where_memory_is_short() -> None:
    loaded = load_model("gpt2", 64)
    whole = Cluster.parse(GPUS)
    short = replace(whole, device=replace(whole.device, memory_bytes=int(1.3 * 2**30), communicator_bytes=0, base_bytes=0))
    plan = make_plan(loaded.model, short, loaded.example_inputs, precision="bf16", force="tp=1,pp=1")
    assert is_compiled(plan) and any(block.offload for block in plan.candidate.blocks)
