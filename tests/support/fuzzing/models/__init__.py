"""Random small models through capture, plan, program and ranks, against one process.

`statements` is what models are made of, `writer` writes the text of one, `trial` takes it all the way, `on_ranks` is what a rank
does. ``python -m support.fuzzing.models --seed 7 --show`` makes one trial again, and prints the model.
"""
