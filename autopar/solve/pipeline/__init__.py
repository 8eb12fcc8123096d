"""Pipelines: `point_bounds` bounds the pipeline points of the grid, `pipeline_ranking` estimates them, and `stage_search` solves
the best (placements per stage mesh by `stage_placement`, then `stage_tables`, the dynamic program of `stage_partition`);
`synthesize` finds a schedule of its own by CP-SAT. Start in `pipeline_search`. Imports all other rooms of `solve`, and
`autopar.schedules`.
"""
