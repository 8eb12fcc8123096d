"""Training frameworks on top of autopar. Nothing here is imported by ``import autopar``: the libraries are optional extras.

`transformers.Trainer` is the Trainer of that library, `accelerate.Accelerator` the accelerator of that one. Both present all
processes as one device to their library (`one_device`): each process reads the global batch, and the parallel model divides it.
"""
