"""Rewrites of a captured graph under a plan into the program of one rank, as passes over the IR of one block at a time.

Start at `lower.py`: `passes()` is the list of all rewrites in their order, and `lower()` runs it and verifies the IR after each.
`split_totals` and `split_stages` come first and rewrite the calls of blocks (micro-batches, pipeline chunks); all other passes
rewrite inside a block, whose state between two of them is a `base.BlockState`. The result is a `lowered.Lowered`, which
`autopar.program` writes as Python text. Imports `ir`, `rules` and `schedules` only: no cost model, no solver, no torch.
"""
