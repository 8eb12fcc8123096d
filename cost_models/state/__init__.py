"""Parameters, gradients and optimizer state under ZeRO: bytes on one device, and seconds of their communication and update.

Start at `state_memory` for bytes and at `state_cost` for seconds, also of a step of several micro-batches; `optimizers` lists
what each optimizer keeps and streams. Imports `hardware`, `comm`, `tensors`, `formulas` and ``autopar.ir``; `step` imports this
folder.
"""
