"""Plans of tiny models on forced degrees, made once a process: a dense one, a pipeline, experts, one with batch norm."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import autopar
from autopar.capture.models import load_model
from autopar.ir.plan_file.plan_file import Plan

TINY = {
    "dense": ("llama-tiny", "dp=2,tp=4,zero=3"),
    "pipeline": ("gpt2-tiny", "pp=2,dp=2,tp=2"),
    "mixture": ("mixtral-tiny", "dp=2,ep=4"),
    "buffers": ("convnet", "dp=4,tp=2"),
}
CAPTURED = ("dense", "pipeline", "mixture")


@cache
def tiny_plan(kind: str) -> Plan:
    """The plan of that kind."""
    name, force = TINY[kind]
    loaded = load_model(name, 16, None, device="meta")
    return autopar.plan(loaded.model, "dgx-h100:1", loaded.example_inputs, force=force, batch=16)


@cache
def tiny_document(kind: str) -> dict[str, Any]:
    """Its plan.json."""
    return json.loads(tiny_plan(kind).to_json())  # type: ignore[no-any-return]
