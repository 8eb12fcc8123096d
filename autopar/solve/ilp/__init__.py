"""The integer linear program of one mesh: strategies, placements, conversions, state sharding, recomputation and offloading,
decided jointly.

Start at `formulate`, which lists the groups of variables and constraints (`formulation` names the columns, `memory_events` adds
the memory constraint), and at `solve_mesh`, which solves, decodes and prices. `recompute_offload` decides what is saved,
recomputed and offloaded, `state_sharding` the ZeRO stages. Only `solver_call` knows OR-tools. Imports ``solve.problem``,
``solve.space`` and the cost models, whose terms it mirrors under equal names.
"""
