"""Training frameworks on top of autopar. Nothing here is imported by ``import autopar``: the libraries are optional extras.

`transformers.Trainer` is the Trainer of that library, `accelerate.Accelerator` the accelerator of that one,
`lightning.AutoparStrategy` a strategy of Lightning. All present all processes as one device to their library: each process reads
the global batch, and the parallel model divides it.
"""
