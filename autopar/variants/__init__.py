"""Further programs of one parallel model: what a call may change (mode, arguments, lengths, batch size) selects a *variant*,
which is captured when it is first met and planned with the mesh and the stored placements of the parameters fixed.

Start with `maker`, which does all of it for a call. `planner` makes the plan: it takes over the decisions of an
equal graph of other sizes, and cuts another graph where the weights are. Imports capture, solve and program.
"""
