"""The intermediate representation: frozen data that all other packages read.

Start with `graph` (the captured forward), `placement` (Shard, Replicate, Partial, Invariant) and `plan` (the solver's decisions).
`pipeline` splits a graph into model chunks, `plan_file` is ``plan.json``, `verify` checks that a plan fits its graph.
Imports `errors` only, and no torch.
"""
