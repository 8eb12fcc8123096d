"""The operations of a graph, a file a family: how each may be sharded, what it costs, and how the program writes it.

Start with `table`. To add an operation, write its record (`operation.Operation`) in the file of its family, and an example for
`tests/rules`. `notation` has the language of rules and of spellings. All other rooms ask here what an operation is. Imports `ir`.
"""
