"""The tables of commands: one module per table, which takes a plan (and prices nothing itself) and writes to a `Console`.

The numbers come from plan.json, or from `cost_models` through `cli/evaluation.py`. What only one command prints stands in that
command.
"""
