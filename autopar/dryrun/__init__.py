"""The dry run: one rank of any cluster on fake tensors, with its peak memory, its tensors at the peak, and its collectives.

Start at `run.dry_run`. `compat` has the private torch interfaces. Imports `program` and `runtime`.
"""
