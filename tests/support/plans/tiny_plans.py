"""Plans of tiny models on forced degrees, made once a run of the tests: a dense one, a pipeline, experts, one with batch norm."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import autopar
from autopar.capture.models import load_model
from autopar.ir.plan_file.plan_file import Plan, load_plan

TINY = {
    "dense": ("llama-tiny", "dp=2,tp=4,zero=3"),
    "pipeline": ("gpt2-tiny", "pp=2,dp=2,tp=2"),
    "mixture": ("mixtral-tiny", "dp=2,ep=4"),
    "buffers": ("convnet", "dp=4,tp=2"),
}
CAPTURED = ("dense", "pipeline", "mixture")


@cache
def tiny_plan(kind: str) -> Plan:
    """The plan of that kind, read from the file that the first worker writes."""
    path = Path(os.environ["AUTOPAR_TEST_RUN"]) / f"{kind}.plan.json"
    if not path.exists():
        name, force = TINY[kind]
        loaded = load_model(name, 16, None, device="meta")
        autopar.plan(loaded.model, "dgx-h100:1", loaded.example_inputs, force=force, batch=16).save(str(path))
    return load_plan(str(path))


@cache
def tiny_document(kind: str) -> dict[str, Any]:
    """Its plan.json."""
    return json.loads(tiny_plan(kind).to_json())  # type: ignore[no-any-return]
