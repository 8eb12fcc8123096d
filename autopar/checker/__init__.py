"""Proves that a generated program computes what the model does, from the text that runs.

Start at `certificate.py`, which puts the claims together. `text.py` reads the program; `blocks` carries types through one block
and finds each operation in the captured graph, `program.py` and `block_calls.py` do the same for calls of blocks, `order.py` for
schedules. `rows` has the rules, written apart from those of the compiler. `modules` judges what people parallelised by hand.
Imports `autopar.ir`, `errors` and torch.
"""
