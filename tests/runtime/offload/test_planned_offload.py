"""Optimizer offload that a plan has: found where nothing fits without it, forced, priced, and run without a call by hand."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import OffloadTarget
from autopar.cost_models.state import state_memory
from autopar.cost_models.step.evaluate import Evaluation, evaluate
from autopar.errors import AutoparError, Infeasible, PlanError
from autopar.ir.plan_file.plan_file import Plan, load_plan

PART_BYTES = 2**13
"""Instead of 256 MiB, for a model of 25 thousand parameters."""

HOST = OffloadTarget("host", 2.0**30, 20e9, 10e9)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=torch.float64) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return nn.functional.mse_loss(x, y)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 64, generator=generator, dtype=torch.float64) for name in "xy"}


def cluster_of(host: OffloadTarget | None = HOST, nvme: OffloadTarget | None = None) -> Cluster:
    whole = Cluster.parse("local:4")
    return replace(whole, device=replace(whole.device, memory_margin=0.0), host=host, nvme=nvme)


def sized(memory_bytes: float) -> Cluster:
    whole = cluster_of()
    return replace(whole, device=replace(whole.device, memory_bytes=int(memory_bytes)))


def planned(cluster: Cluster, force: str) -> Plan:
    with warnings.catch_warnings(action="ignore"):
        return autopar.plan(Layers(), cluster, batch(0), force=force, memory_margin=0.0)


def priced(plan: Plan, cluster: Cluster) -> Evaluation:
    return evaluate(plan.graph, plan.candidate, cluster)


CONFIGURATION = "tp=1,pp=1,zero=3,micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_memory, "PART_BYTES", PART_BYTES)


def test_memory_and_seconds_of_a_forced_one(small_parts: None) -> None:
    """The state is off the device but for two parts, and is read and written once a step; NVMe is slower by its bandwidth."""
    cluster = cluster_of(nvme=OffloadTarget("nvme", 2.0**40, 2e9, 1e9))
    plain, host, nvme = (
        priced(planned(cluster, CONFIGURATION + offload), cluster)
        for offload in ("", ",offload_optimizer=cpu", ",offload_optimizer=nvme")
    )
    state = 2 * 8 * 6 * (64 * 64 + 64) / 4
    assert dict(plain.memory)["optimizer"] == state and dict(host.memory)["optimizer"] == 0
    assert host.peak_memory_bytes < plain.peak_memory_bytes
    assert host.optimizer_seconds - plain.optimizer_seconds == pytest.approx(state / 20e9 + state / 10e9)
    assert nvme.optimizer_seconds - plain.optimizer_seconds == pytest.approx(state / 2e9 + state / 1e9)
    assert nvme.peak_memory_bytes == host.peak_memory_bytes
    gpu = state_memory.offloaded_update_seconds
    cuda = replace(cluster.device, kind="cuda")
    assert gpu(1e-3, 1e6, HOST, cuda) == 1e-3 and gpu(1e-5, 1e6, HOST, cuda) == pytest.approx(1.5e-4)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    with pytest.raises(AutoparError, match="offload_optimizer=disk: write cpu, nvme or none"):
        planned(cluster_of(), "offload_optimizer=disk")
    with pytest.raises(PlanError, match="has no nvme, so no optimizer state can be offloaded to it"):
        planned(cluster_of(), CONFIGURATION + ",offload_optimizer=nvme")
    little = cluster_of(replace(HOST, capacity_bytes=1000.0))
    assert not priced(planned(little, CONFIGURATION + ",offload_optimizer=cpu"), little).fits


def tight() -> Cluster:
    """Less than parameters, gradients and AdamW's state take, however they are sharded; more than without the latter."""
    cluster, force = cluster_of(), CONFIGURATION.replace("tp=1", "tp=4").replace("zero=3", "zero=0")
    whole, offloaded = (
        priced(planned(cluster, force + more), cluster).peak_memory_bytes for more in ("", ",offload_optimizer=cpu")
    )
    return sized(0.75 * offloaded + 0.25 * whole)


def steps(model: Any) -> tuple[list[float], list[int]]:
    """Five steps with a scheduler, a hook of the user's and, in one of them, a closure. Losses, and parts that were copied."""
    from autopar.runtime.device.offload import HostMemory

    copies: list[int] = []
    to_host = HostMemory.copy_to_host
    HostMemory.copy_to_host = lambda self, x: copies.append(x.numel()) or to_host(self, x)  # type: ignore[func-returns-value,method-assign]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses: list[float] = []

    def closure(seed: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch(seed))
        loss.backward()
        losses.append(loss.item())
        return loss

    try:
        for seed in range(4):
            closure(seed)
            optimizer.step()
            schedule.step()
        optimizer.step(lambda: closure(4))
        closure(5)
    finally:
        HostMemory.copy_to_host = to_host  # type: ignore[method-assign]
    return losses, copies


def on_ranks(paths: list[str]) -> list[Any]:
    from autopar.runtime.state import offload_optimizer

    offload_optimizer.PART_BYTES = PART_BYTES
    out = []
    for path in paths:
        try:
            parallel = autopar.parallelize(Layers(), "local:4", batch(0), plan=path)
        except AutoparError as error:
            out.append(str(error))
            continue
        out.append((*steps(parallel), parallel.full_state()))
    return out


def test_one_that_does_not_fit_otherwise_is_planned_and_trains_like_one_process(
    small_parts: None, ranks: RankPool, tmp_path: Path
) -> None:
    cluster = tight()
    with pytest.raises(Infeasible):
        planned(cluster, "offload_optimizer=none")
    found = planned(cluster, "")
    assert found.candidate.precision.offload_optimizer == "cpu" and priced(found, cluster).fits
    assert planned(cluster_of(), "").candidate.precision.offload_optimizer == "", "taken only where nothing else fits"
    paths = [str(tmp_path / name) for name in ("cpu.json", "device.json", "nvme.json")]
    found.save(paths[0])
    assert load_plan(paths[0]).candidate == found.candidate
    text = json.loads(Path(paths[0]).read_text())
    for path, where in zip(paths[1:], ("", "nvme"), strict=True):
        text["precision"]["offload_optimizer"] = where
        Path(path).write_text(json.dumps(text))
    model = Layers()
    expected, _ = steps(model)
    for offloaded, plain, nvme in ranks.run(on_ranks, paths, timeout=200):
        assert offloaded[1] and not plain[1]
        assert offloaded[0] == plain[0] and all(torch.equal(offloaded[2][name], plain[2][name]) for name in plain[2])
        assert offloaded[0] == pytest.approx(expected, rel=1e-9)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(offloaded[2][name], tensor, rtol=1e-9, atol=1e-12)
        assert nvme.startswith("the plan keeps the optimizer's state on nvme") and "\n" not in nvme
