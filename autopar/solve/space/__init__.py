"""The space that the search enumerates outside of the ILP: meshes, micro-batches, state groups and pipelines.

Start at `grid` (points without a pipeline), made of `meshes`, and at `pipeline_grid` (pipelines and their schedules); `options`
is what the user asks for, and `problem_tables` caches the tables of each point. Imports ``solve.problem`` and what that imports.
"""
