"""The rule of a module that was left whole: ``ap.opaque((arguments, parameters, buffers), key, names, training, batchwise)``."""

from __future__ import annotations

from autopar.ir.dims import Shape
from autopar.ir.graph import Node
from autopar.operations.notation.rule import DerivedLine


def opaque_rule(node: Node, shapes: tuple[Shape, ...]) -> DerivedLine | None:
    """Declared batchwise, the batch of arguments and results may be sharded, and nothing else; else there is no line, and every
    rank computes it whole."""
    _, _, names, _, batchwise = node.args
    arguments = len(str(names).split())
    batch = next((shape[0] for shape in shapes[:arguments] if shape), None)
    if not batchwise or batch is None or any(not value.shape or value.shape[0] != batch for value in node.outputs):
        return None
    operands = [_words(f"i{number}", shape, batch if number < arguments else None) for number, shape in enumerate(shapes)]
    results = [_words(f"o{number}", value.shape, batch) for number, value in enumerate(node.outputs)]
    return DerivedLine(f"{', '.join(operands)} -> {', '.join(results)}")


def _words(prefix: str, shape: Shape, batch: object) -> str:
    return " ".join("b" if dim == 0 and size == batch else f"{prefix}d{dim}!" for dim, size in enumerate(shape))
