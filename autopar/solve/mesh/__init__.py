"""Meshes without pipeline stages: `mesh_bounds` bounds these points of the grid, `mesh_search` solves them by the integer
program. Start in `mesh_search`. Imports `bounds`, `ilp`, `space` and `problem`.
"""
