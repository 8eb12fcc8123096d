"""The graphs of inference: a model in evaluation whose parameters are frozen, and one step of its decoding with a key-value
cache, as `runtime.cached_generation` computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn

from autopar.capture import capture
from autopar.capture.tracing.fake_copy import copy_without_data
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.runtime.cached_generation import CACHE_OUTPUTS, cache_capacity
from autopar.runtime.key_value_cache import KeyValueCache
from autopar.runtime.plain.plain_model import preserved_modes


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation, with no parameter that trains, and afterwards back."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with preserved_modes(model):
        model.eval().requires_grad_(False)
        try:
            yield
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)


def capture_decode(
    model: nn.Module, prompt: Mapping[str, Any], new_tokens: int, *, compute_dtype: str | None, float8: bool = False
) -> Graph:
    """Return the graph of one token of each sequence after the `prompt` (example inputs), with the cache that a sequence of
    `new_tokens` more needs. CaptureError for what is no decoder of transformers with a key-value cache."""
    ids, parameters = prompt.get("input_ids"), signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    if not (isinstance(ids, torch.Tensor) and hasattr(config, "get_text_config") and "past_key_values" in parameters):
        raise CaptureError(
            f"new_tokens={new_tokens} is for decoders of transformers with a key-value cache, called with input_ids=, and "
            f"{type(model).__name__} is none: leave it out to plan one forward"
        )
    text = config.get_text_config()
    batch, length = ids.shape
    most = getattr(text, "max_position_embeddings", None)
    if most is not None and length + new_tokens > most:
        raise CaptureError(f"{length} + {new_tokens} tokens, and {type(model).__name__} has positions for {most}: lower them")
    capacity = cache_capacity(length + new_tokens, most)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype = getattr(torch, compute_dtype) if compute_dtype else next(iter(model.parameters())).dtype

    def whole(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def layers() -> list[torch.Tensor]:
        return [torch.empty(batch, heads, capacity, size, dtype=dtype, device="meta") for _ in range(text.num_hidden_layers)]

    inputs: dict[str, Any] = {"input_ids": whole(batch, 1), "attention_mask": whole(batch, capacity)}
    if "position_ids" in parameters:
        inputs["position_ids"] = whole(batch, 1)
    inputs |= {"past_key_values": KeyValueCache(layers(), layers(), whole()), "use_cache": True}
    with torch.no_grad():
        copy = copy_without_data(model, None)
        return capture(copy, (), inputs, compute_dtype=compute_dtype, outputs=CACHE_OUTPUTS, float8=float8)
