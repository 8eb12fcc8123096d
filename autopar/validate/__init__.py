"""The cost models against published measurements: rows of a table -> model -> graph -> forced candidate -> evaluator."""
