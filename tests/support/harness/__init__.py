"""Runs programs: the pool of forked ranks, launching scripts, the training loop, and the comparison with one process."""
