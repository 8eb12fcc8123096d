"""The reasons of a plan: what its step and its memory are made of, and what another plan would cost.

`reasons` writes the sentences and evaluates single changes, `operation_and_collective_rows` lists the costliest of these
with their formulas, `what_if` plans under other constraints. Nothing is priced here: numbers are those of
``cost_models.step.evaluate`` and ``cost_models.breakdown``. Imports ``solve``, ``cost_models`` and ``ir``; ``cli`` imports it.
"""
