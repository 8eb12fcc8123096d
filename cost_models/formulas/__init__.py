"""The formulas of the cost models as text, each with the meaning of its parameters and its source. Start at `registry.formula`,
which lists them. Imports nothing of autopar."""
