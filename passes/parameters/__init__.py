"""Passes on the parameters of one rank's program: casts from the dtype in which they are stored, and copies of what a block
returns of their storage. Start at `copy_parameter_views.py`. Imports `autopar.passes.base`, `ir` and `cost_models.tensors`."""
