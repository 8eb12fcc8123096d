"""The sharding rules of all operations: `aten.table` lists them; the other files write the lines that depend on shapes.

Start with `aten` to add a rule. `priced_only` has operations of published runs, which no plan contains. Imports `ir` and the rest
of `rules`.
"""
