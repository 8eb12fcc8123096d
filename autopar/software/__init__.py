"""Other software: what Megatron, torchtitan, DeepSpeed, accelerate and the Trainer can be set to, priced by the evaluator.

Start in `record` (what a software is: knobs, rules with sources, files) and `known` (one file each). `configuration` has the
common words, `space` lists settings, `pricer` prices them, `choose` ranks them and answers ``plan --for``, `fit` reads somebody's
file, `spending` compares clusters. `by_hand` is the one interface of planning: recipes as experts run them beside a plan, with
`stage_points` and runs that were measured. `stacks` says who runs what with which constants. Imports `decoders`, the cost models
and fixed configurations of the search, which knows nothing of this.
"""
