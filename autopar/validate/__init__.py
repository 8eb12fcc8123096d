"""Compares the cost models with published runs: a row of a table -> its model -> graph -> fixed configuration -> evaluator.

Start with `price.Session`. `architectures` and `modules` rebuild the model of a row, `graphs` its graph, `configuration` how it
was parallelized, `summary` and `report` the errors. Imports `capture`, `rules`, `cost_models` and `solve`.
"""
