"""What is said to `parallelize` reaches the planner, now or at the first call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import api, planning
from autopar.errors import AutoparError
from autopar.options import PlanOptions

SAID: dict[str, Any] = {
    "precision": "float64", "force": "dp=1", "constrain": {"x": {"tp": "R"}}, "optimizer": "sgd", "strict": True,
    "time_limit_seconds": 7.0, "outputs": ("logits",), "batch_norm": "local", "expert_load": 1.5, "document_lengths": 512,
    "loss_fn": nn.functional.mse_loss, "memory_margin": 0.2, "batch_dim": {"x": 0}, "compile": True, "mode": "inference",
    "new_tokens": 3,
}  # fmt: skip


class Reached(Exception):
    """The planner was called."""


@pytest.mark.parametrize("later", [False, True])
def test_every_option_reaches_the_planner(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def planner(model: object, cluster: object, inputs: object, options: PlanOptions, **rest: Any) -> Any:
        asked.update({each.name: getattr(options, each.name) for each in fields(options)})
        raise Reached

    def first(make: Callable[[], Any]) -> Any:
        return make()

    monkeypatch.setattr(api, "join", lambda *given, **options: None)
    monkeypatch.setattr(api, "on_first_rank", first)
    monkeypatch.setattr(api, "plan_with", planner)
    model, batch = nn.Linear(2, 2), {"input": torch.zeros(1, 2)}
    with pytest.raises(Reached):
        made = api.parallelize(model, "local:1", None if later else batch, **SAID)
        made(**batch)
    assert {name: asked.get(name) for name in SAID} == SAID
    common = set(signature(api.parallelize).parameters) & set(signature(planning.make_plan).parameters)
    common -= {"beside"}  # which arrives as held_bytes: tests/solve/test_memory_margin.py, tests/e2e/variants/test_outside.py
    assert common - {"model", "cluster", "example_inputs", "cache"} == set(SAID), "an option that this test does not say"
    beside = {"model", "cluster", "example_inputs", "cache", "progress", "graph", "beside"}
    assert {each.name for each in fields(PlanOptions)} - {"held_bytes"} == set(signature(planning.make_plan).parameters) - beside


@pytest.mark.parametrize("backend", ["aot_eager", "no", 1, ""])
def test_a_plan_is_priced_as_compiled_or_not(backend: Any) -> None:
    """No backend changes a price; it would be taken for fractions of neither."""
    with pytest.raises(AutoparError, match="compile=.* says nothing about prices"):
        autopar.plan(nn.Linear(2, 2), "local:1", {"input": torch.zeros(4, 2)}, compile=backend)
