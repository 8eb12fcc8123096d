"""The integer program, and the search over meshes, micro-batches and pipelines around it."""
