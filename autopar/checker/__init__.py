"""Proves that a generated program computes what the model does, from the text that runs.

Start at `certificate.py`, which puts the claims together. `text.py` reads the program, `block.py` carries types through one block
and finds each operation in the captured graph, `program.py` does the same for calls of blocks, `order.py` for schedules.
`table.py` has the rules, written apart from those of the compiler. Imports `autopar.ir`, `errors` and torch.
"""
