"""Optimizer offload: the numbers are those without it, bit by bit; the state lies on the host between steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from support.models.handwritten_program import batch, make, state
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.parallel import Parallel

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.5, centered=True),
    "counts": lambda parameters: Counting(parameters, dict(lr=1e-2, steps=0)),
}


class Counting(torch.optim.Optimizer):
    """Counts its steps in its groups, as some optimizers of other packages do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                    seen.add_(p.grad)
                    p.sub_(seen, alpha=group["lr"] / group["steps"])


def trained(axes: dict[str, int], zero: int, name: str, offload: bool, folder: str) -> Any:
    """On a rank: three steps with a schedule, a checkpoint, two steps more from it. Copies to and from the host are counted."""
    from autopar.runtime.device.offload import HostMemory
    from autopar.runtime.state import offload_optimizer

    parallel = Parallel(make(axes, zero), state())
    optimizer = OPTIMIZERS[name](parallel.parameters())
    copies = []
    to_host, offload_optimizer.PART_BYTES = HostMemory.copy_to_host, 500
    HostMemory.copy_to_host = lambda self, x: copies.append(x.data_ptr()) or to_host(self, x)  # type: ignore[func-returns-value,method-assign]
    try:
        if offload:
            parallel.offload_optimizer(optimizer)
        hooks: list[int] = []
        optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(parallel, [batch(seed) for seed in range(3)], optimizer, after_step=lambda _: schedule.step())
        parallel.save(f"{folder}/{name}", optimizer, step=3)
        train(parallel, [batch(9)], optimizer)
        assert parallel.load(f"{folder}/{name}", optimizer) is not None
        train(parallel, [batch(seed) for seed in range(3, 5)], optimizer)
    finally:
        HostMemory.copy_to_host = to_host  # type: ignore[method-assign]
    assert len(hooks) == 6 and bool(copies) == offload
    full = parallel.full_optimizer_state(optimizer)
    return parallel.full_state(), full["state"], [{**group, "params": 0} for group in full["param_groups"]]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def check(axes: Any, zero: int, names: Iterable[str], ranks: RankPool, tmp_path: Path) -> None:
    for name in names:
        plain = ranks.run(trained, axes, zero, name, False, str(tmp_path / "plain"))
        offloaded = ranks.run(trained, axes, zero, name, True, str(tmp_path / "offloaded"))
        assert same(plain, offloaded), name


def test_the_numbers_are_those_without_it(ranks: RankPool, tmp_path: Path) -> None:
    check({"dp": 2, "tp": 2}, 3, ("adamw", "counts"), ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "zero"), [({"dp": 2, "tp": 2}, 3), ({"dp": 4}, 0)])
def test_of_further_optimizers(axes: Any, zero: int, ranks: RankPool, tmp_path: Path) -> None:
    check(axes, zero, OPTIMIZERS, ranks, tmp_path)


def said() -> list[str]:
    parallel = Parallel(make({"dp": 4}, 0), state())
    out = []
    twice = torch.optim.SGD(parallel.parameters())
    parallel.offload_optimizer(twice)
    for optimizer, device in (
        (torch.optim.LBFGS(parallel.parameters()), "cpu"),
        (twice, "cpu"),
        (torch.optim.SGD(parallel.parameters()), "nvme"),
    ):
        try:
            parallel.offload_optimizer(optimizer, device)
            out.append("not refused")
        except AutoparError as error:
            out.append(str(error))
    return out


def test_what_cannot_be_offloaded_is_refused(ranks: RankPool) -> None:
    for closure, twice, nvme in ranks.run(said):
        assert "LBFGS needs its closure" in closure and "was replaced" in twice and "offloaded to nvme" in nvme
