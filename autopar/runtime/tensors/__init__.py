"""What torch's own functions do with the DTensors of a parallel model; start at `torch_functions`."""
