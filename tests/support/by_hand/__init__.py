"""Modules that are parallel by hand, as Megatron's are: layers, right and wrong cases, differences of their losses."""
