"""Torch's own functions on the DTensors of a parallel model; start at `torch_functions`."""
