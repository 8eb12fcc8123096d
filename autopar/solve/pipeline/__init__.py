"""Pipelines: `pipeline_bounds` bounds these points of the grid, and `pipeline_search` estimates and solves them: `stage_search`
partitions the best (placements per stage mesh by `stage_placement`, then `stage_tables`, the dynamic program of
`stage_partition`, `stage_choices`, which uses the memory that it leaves free, and `stage_cuts`, which moves calls between chunks
on the clock); `synthesize` finds a schedule of its own by CP-SAT. Start in `pipeline_search`. Imports all other rooms of `solve`,
and `autopar.schedules`."""
