"""The planner: an integer program per mesh, and the search over meshes, micro-batches and pipelines around it. Start in
`search` (its points are in `search_state`, `tighten` raises their bounds, its result is in `result`); `infeasible` explains why
nothing fits, `report` makes the plan file. Rooms, each of which imports those before it: `problem` (what is allowed, at which
cost), `space` (options, meshes, the grids), `ilp`, `fixed` (configurations without a search), `bounds`, `mesh`, `pipeline` (the
two kinds of points, bounded and solved). Imports `cost_models`, `rules`, `schedules` and `ir`.
"""
