"""Names of the generated text that must not clash with those of torch and of the runtime's base classes."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.passes.readable_names import identifier
from autopar.runtime.attribute_names import attribute_of as attribute_of

IMPORTED_NAMES = frozenset(
    ("BlockModule", "ParameterSpec", "Program", "Base", "BoundaryTensor", "ModelChunk", "Recompute", "C", "F", "Tensor", "nn")
    + ("torch",)
)


def class_names(blocks: Iterable[str]) -> dict[str, str]:
    """A class for each block: its name, unless the module imports that one."""
    return {name: f"Model{name}" if name in IMPORTED_NAMES else identifier(name) for name in blocks}
