"""Parameters, gradients and optimizer state under ZeRO: bytes on one device, and seconds of their communication and update.

Start at `state_memory` for bytes and at `state_cost` for seconds; `optimizers` lists what each optimizer keeps and streams, and
`state_communication` tells how often a step of several micro-batches gathers and reduces. Imports `hardware`, `comm`, `tensors`,
`formulas` and ``autopar.ir``; `step` imports this folder.
"""
