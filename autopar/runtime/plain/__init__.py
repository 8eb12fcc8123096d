"""The plain model that a parallel one was made from: what programs read of it, the tree of its modules, and assignments to them.

Start at `plain_model`. `frozen_reads` and `code_reads` are what captures have read; `module_tree` stands for its modules.
"""
