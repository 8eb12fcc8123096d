"""Attributes of blocks under which their parameters stand, in the generated text and in `module.BlockModule` alike."""

from __future__ import annotations

import re

from torch import nn

RESERVED_ATTRIBUTES = frozenset(
    ("mesh", "prefix", "original_names", "zero", "recompute", "selective_recompute", "uses_rng", "training_noise")
    + ("writes_buffers", "specs", "training", "split_backward", "shared_parameters", "blocks", "roots", "position", "precision")
    + ("mesh_axes", "micro_batches", "zero_group", "totals", "count", "loss_dtype", "weight_versions", "offload_optimizer")
    + ("input_placements", "input_shapes", "input_dtypes", "positional", "arguments", "constants", "defaults", "outputs")
    + ("batch_dims", "reduce_dtype", "forward_only")
    + ("chunks", "boundaries", "schedule", "batch_inputs", "micro_batch_size", "weight_grads")
    + ("all_chunks", "own_chunks", "chunk_stages", "actions", "output_kinds", "has_loss", "differentiable_inputs")
    + ("state_program",)
)
"""Attributes of the classes of `module`; a parameter whose path makes one of these names gets another attribute."""


def attribute_of(path: str) -> str:
    """Return the path of a parameter with ``_`` for dots, made an identifier that hides nothing of nn.Module."""
    name = re.sub(r"\W", "_", path)
    if name[0].isdigit():
        return f"p{name}"
    return f"{name}_" if name in RESERVED_ATTRIBUTES or hasattr(nn.Module, name) else name
