"""The operations of a graph, a file a family: what each is, and how it may be sharded.

Start with `table`; `notation` has the language of sharding rules. Every other room asks here what an operation is. Imports `ir`.
"""
