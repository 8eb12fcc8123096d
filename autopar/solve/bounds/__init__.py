"""Lower bounds that prune points of the grid, and quick plans that are compared with them.

Bounds, cheapest first: `flow_bound` (operations, then conversion flows) and `memory_bound` (saved tensors and state). Plans:
`memory_frontier` (plans of one sharding that take less and less memory, at the corners of a `frontier`), `warm_start` (a first
plan that fits) and `minimum_memory` (the plan that takes least). Imports ``solve.ilp``, ``solve.fixed`` and what these import.
"""
