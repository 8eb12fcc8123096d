"""Random small models through capture, plan, program and ranks, against one process.

`statements` is what models are made of, `writer` writes the text of one (`body`: of a forward), `trial` takes it to its program,
`on_ranks` is what a rank does, `compare` runs trials on ranks, `many` counts what came of them.
``python -m support.fuzzing.models --seed 7 --show`` makes one trial again, and prints the model.
"""
