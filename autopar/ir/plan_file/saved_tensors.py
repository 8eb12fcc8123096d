"""The tensors of one operation that autograd saves for its backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that an operation saves for its backward, and its workspace.

    operands, results: which of them are saved.
    extra_ratio: bytes of other saved tensors, as a multiple of the bytes of `extra_reference`: the index of an operand, or
        ``-1 - index`` of a result.
    forward_workspace_ratio, backward_workspace_ratio: bytes that the operation allocates while it runs, beside operands, results,
        their gradients and saved tensors, as multiples of the bytes of `workspace_reference` (an index as above).
    known: false where torch could not run the operation: then everything is taken to be saved.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_ratio: float = 0.0
    extra_reference: int = 0
    known: bool = True
    forward_workspace_ratio: float = 0.0
    backward_workspace_ratio: float = 0.0
    workspace_reference: int = 0
