"""Casts to float8 with dynamic scaling of whole tensors, as torchao runs them beside the products.

Each operand is read for its largest magnitude, read again, and written in float8: x and the weight in the forward, and both and
the gradient of the result in the backward (torchao keeps nothing of the forward's casts).
Accesses count elements of bfloat16 size.
"""

from __future__ import annotations

from autopar.cost_models.compute.kernels import streaming_seconds
from autopar.cost_models.hardware.device_specs import Device

_FUSED = 2.5
"""Read for the maximum, read, written at half the size: what a compiler makes of it."""

_EAGER = 11.5
"""Kernel by kernel: the magnitude is written and read, the scaled and the clamped tensor are float32."""


def scaling_seconds(device: Device, operand_bytes: float, result_bytes: float) -> tuple[float, float]:
    """Return the seconds of the casts of one linear layer on one rank, forward and backward, from the bytes of x and the weight,
    and those of the result."""
    accesses = _FUSED if device.fused else _EAGER
    return (
        streaming_seconds(device, accesses * operand_bytes),
        streaming_seconds(device, accesses * (operand_bytes + result_bytes)),
    )
