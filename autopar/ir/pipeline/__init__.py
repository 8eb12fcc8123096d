"""The graph of a pipeline: `chunk_calls` distributes calls to model chunks, `stage_values` finds the values that cross borders
between chunks, `split_blocks` splits a block so that a border may lie inside of it.

Start with `chunk_calls.chunk_calls`. Imports `ir` only.
"""
