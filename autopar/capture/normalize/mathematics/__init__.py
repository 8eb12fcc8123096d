"""Recovers functions that a model writes out in pointwise operations: norms and activations become one operation of torch.

Nothing is matched but complex products and writes, which `complex_pairs` takes apart: `regions` cuts out what depends on one
tensor, `recover` lists what it may be, and executes both. Imports `ir` and the helpers of `capture`.
"""

from __future__ import annotations

from autopar.capture.normalize.mathematics.complex_pairs import complex_writes, real_products
from autopar.capture.normalize.mathematics.recover import written_out

__all__ = ["complex_writes", "real_products", "written_out"]
