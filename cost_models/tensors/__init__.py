"""Tensors of an operation: bytes, FLOPs, what autograd saves for the backward, workspace, and which values alias. Start at
`sizes` and `saved_tensors.saved_tensors`. Imports `autopar.ir` and `autopar.rules` (aliases: which conversions are free)."""
