"""Bundled models of tiny sizes with their batches and what one process makes of them."""

from __future__ import annotations

from functools import cache

import torch

from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.verification.single import lift_casts
from support.harness.end_to_end import Prepared, prepare_model
from support.models.small_models import Case, make_case

TINY = ("mlp", "convnet", "gpt2-tiny", "llama-tiny", "mixtral-tiny", "qwen3-tiny", "bert-tiny", "vit-tiny")


@cache
def prepare_bundled(name: str, batch: int = 16) -> Prepared:
    """In float64, with the casts inside the model lifted, as `end_to_end.prepare` does."""
    loaded = load_model(name, batch, None, "float64", device="cpu")
    given = loaded.example_inputs
    assert isinstance(given, dict)
    model, inputs = make_case(Case(lambda: loaded.model, lambda size: given), torch.float64, batch)
    graph = lift_casts(capture(model, (), inputs, compute_dtype="float64"))
    return prepare_model(name, model, inputs, graph, lift=True)
