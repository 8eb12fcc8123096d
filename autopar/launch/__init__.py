"""Files for schedulers that start a program on the nodes of a plan's cluster: `job.py` has what they have in common, and writes
them. All run ``torchrun`` once on each node, with the nodes in the scheduler's order, so that neighbouring ranks are neighbours.
Imports cost models, nothing of what runs a plan."""
