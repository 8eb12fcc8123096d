"""The choices on one mesh, and the cost of each: strategies of operations, placements of the tensors between blocks, and
conversions between placements, as plain tables without variables or a solver.

Start at `problem` (the priced tables); `structure` makes the same tables without prices, `boundary` says which blocks must agree,
`data_axis` fixes the data axis, and `conversion_graph` lists the redistributions of one tensor. Imports ``ir``, ``rules`` and
``cost_models``, and nothing else of ``solve``.
"""
