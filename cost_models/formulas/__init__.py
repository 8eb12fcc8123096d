"""The formulas of the cost models as text, each with the meaning of its parameters and its source. Start at `registry.formula`; a
new formula is an entry in the `FORMULAS` of one of the modules that `registry` lists. Imports nothing of autopar."""
