"""A plan on local processes beside the model on one process: what `autopar verify` does.

Start at `proof.py`, which makes both sides and compares them. `single` runs the model itself, `draws` gives both sides the same
random numbers, `rank` is one spawned process (torch, the program loader and the runtime only), `differences` compares, `locate`
names the first module that departs. Imports everything but the command line.
"""
