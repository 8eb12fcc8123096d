"""Names of the generated text that must not clash with those of torch and of the runtime's base classes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from autopar.passes.readable_names import identifier

RESERVED_ATTRIBUTES = frozenset(
    ("mesh", "prefix", "original_names", "zero", "recompute", "selective_recompute", "uses_rng", "training_noise")
    + ("batch_statistics", "specs", "training", "split_backward", "shared_parameters", "blocks", "roots", "position", "precision")
    + ("mesh_axes", "micro_batches", "zero_group", "totals", "count", "loss_dtype", "weight_versions", "offload_optimizer")
    + ("input_placements", "input_shapes", "input_dtypes", "positional", "arguments", "constants", "defaults", "outputs")
    + ("batch_dims", "reduce_dtype", "forward_only")
    + ("chunks", "boundaries", "schedule", "batch_inputs", "micro_batch_size", "weight_grads")
    + ("all_chunks", "own_chunks", "chunk_stages", "actions", "output_kinds", "has_loss", "differentiable_inputs")
    + ("state_program",)
)
IMPORTED_NAMES = frozenset(
    (
        "BlockModule",
        "ParameterSpec",
        "Program",
        "Base",
        "BoundaryTensor",
        "ModelChunk",
        "Recompute",
        "C",
        "F",
        "Tensor",
        "nn",
        "torch",
    )
)


def attribute_of(path: str) -> str:
    """The attribute of a parameter: its path with ``_`` for dots; equals ``runtime.module.ParameterSpec.attribute``."""
    name = re.sub(r"\W", "_", path)
    if name[0].isdigit():
        return f"p{name}"
    return f"{name}_" if name in RESERVED_ATTRIBUTES or hasattr(nn.Module, name) else name


def class_names(blocks: Iterable[str]) -> dict[str, str]:
    """A class for each block: its name, unless the module imports that one."""
    return {name: f"Model{name}" if name in IMPORTED_NAMES else identifier(name) for name in blocks}
