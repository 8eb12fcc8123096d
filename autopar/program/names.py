"""Names of the generated text that must not clash with torch's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from autopar.passes.readable_names import identifier

OWN = frozenset(
    {
        "mesh",
        "prefix",
        "original",
        "zero",
        "recompute",
        "replays",
        "draws",
        "batch_statistics",
        "specs",
        "training",
        "lent",
        "blocks",
        "mesh_axes",
        "input_placements",
        "input_shapes",
        "precision",
        "micro_batches",
        "zero_group",
        "totals",
        "count",
        "later",
        "chunks",
        "boundaries",
        "schedule",
        "examples",
        "takes",
        "actions",
        "owners",
        "mine",
        "everything",
        "queue",
        "position",
        "roots",
        "loss_dtype",
        "weight_versions",
        "outputs",
        "positional",
        "arguments",
        "constants",
        "defaults",
        "input_dtypes",
        "noise",
    }
)
IMPORTED = frozenset({"Again", "Block", "Parameter", "Program", "Base", "Boundary", "Chunk", "C", "F", "Tensor", "nn", "torch"})


def attribute_of(path: str) -> str:
    """The attribute of a parameter: its path with ``_`` for dots; equals ``runtime.module.Parameter.attribute``."""
    name = re.sub(r"\W", "_", path)
    if name[0].isdigit():
        return f"p{name}"
    return f"{name}_" if name in OWN or hasattr(nn.Module, name) else name


def class_names(blocks: Iterable[str]) -> dict[str, str]:
    """A class for each block: its name, unless the module imports that one."""
    return {name: f"Model{name}" if name in IMPORTED else identifier(name) for name in blocks}
