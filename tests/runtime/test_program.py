"""A program written by hand trains like the model on one process, on every mesh and state sharding."""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
from support.harness import training_loop
from support.harness.rank_pool import RankPool
from support.harness.training_loop import adamw, clip_gradients
from support.models.handwritten_program import V, make, model
from torch.distributed.tensor import DTensor

from autopar.runtime.parallel import Parallel

PLANS = [({"dp": 4}, 0), ({"dp": 4}, 1), ({"dp": 4}, 2), ({"dp": 4}, 3), ({"tp": 4}, 0), ({"dp": 1, "tp": 4}, 3)]
PLANS += [({"dp": 2, "tp": 2}, 0), ({"dp": 2, "tp": 2}, 3), ({"dp": 2, "tp": 2}, 1)]


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    out = []
    for _ in range(count):
        batch = {"ids": torch.randint(V, (8, 5)), "labels": torch.randint(V, (8, 5))}
        batch["labels"][0], batch["labels"][5, :2] = -100, -100
        out.append(batch)
    return out


def full(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach().clone()


def steps(module: Any, data: list[dict[str, torch.Tensor]], accumulate: int = 1, max_norm: float | None = None) -> dict[str, Any]:
    """Losses, gradients of the first step, norms, and parameters after all steps."""
    value = full if isinstance(module, Parallel) else (lambda t: t.detach().clone())
    out: dict[str, Any] = {"norms": [], "gradients": {}}

    def note(_: int) -> None:
        if not out["gradients"]:
            out["gradients"] = {n: value(p.grad) for n, p in module.named_parameters() if p.grad is not None}
        if max_norm is not None:
            out["norms"].append(clip_gradients(module, max_norm).item())

    out["losses"] = training_loop.train(module, data, adamw(1e-2), accumulate=accumulate, after_backward=note).losses
    out["parameters"] = {n: value(p) for n, p in module.named_parameters()}
    out["buffers"] = {n: b.clone() for n, b in module.named_buffers()}
    return out


def train(axes: dict[str, int], zero: int, state: dict[str, torch.Tensor], data: Any, compile: str = "", **options: Any) -> Any:
    from torch._dynamo import reset
    from torch._dynamo.utils import counters

    reset()
    counters.clear()
    parallel = Parallel(make(axes, zero), state, compile=compile)
    result = steps(parallel, data, **options)
    result["compilations"] = counters["stats"]["unique_graphs"]
    assert all(p.grad is None for p in parallel.program.parameters())
    with torch.no_grad():
        result["eval"] = parallel.eval()(**data[0]).item()
    return result


def same(got: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-9) -> None:
    assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    for kind in ("gradients", "parameters", "buffers"):
        assert got[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            error = (got[kind][name] - value).abs().max() / value.abs().max().clamp(min=1e-30)
            assert error < tolerance, (kind, name, float(error))


def compare(ranks: RankPool, axes: dict[str, int], zero: int, **options: Any) -> list[dict[str, Any]]:
    reference, data = model(), batches(4)
    state = copy.deepcopy(reference.state_dict())
    answers = ranks.run(train, axes, zero, state, data, world=prod(axes.values()), timeout=180, **options)
    options.pop("compile", None)
    expected = steps(reference, data, **options)
    with torch.no_grad():
        expected["eval"] = reference.eval()(**data[0]).item()
    for got in answers:
        same(got, expected)
        assert got["eval"] == pytest.approx(expected["eval"], rel=1e-9)
    return answers


@pytest.mark.parametrize(("axes", "zero"), PLANS)
def test_training_equals_one_process(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    compare(ranks, axes, zero)


@pytest.mark.parametrize(("axes", "zero"), [({"dp": 4}, 0), ({"dp": 2, "tp": 2}, 3)])
def test_accumulation_over_backwards_and_clipping(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    compare(ranks, axes, zero, accumulate=2, max_norm=0.05)


@pytest.mark.parametrize(("axes", "zero"), [({"tp": 4}, 0), ({"dp": 4}, 3)])
def test_clipping(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    compare(ranks, axes, zero, max_norm=0.05)


@pytest.mark.parametrize(
    ("axes", "zero"), [({"dp": 2}, 3), *(pytest.param({"dp": 2, "tp": 2}, zero, marks=pytest.mark.slow) for zero in (0, 3))]
)
def test_compiled(ranks: RankPool, axes: dict[str, int], zero: int) -> None:
    """Three distinct blocks, four in all: while the model trains, each distinct one is compiled once."""
    for found in compare(ranks, axes, zero, compile="aot_eager"):
        assert found["compilations"] == 3
