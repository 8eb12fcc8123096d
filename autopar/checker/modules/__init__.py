"""Modules that somebody parallelised by hand: what ranks run is recorded, and the checker's rows carry kinds through the lines.

`recording.py` records forward and backward of one rank, `ranks.py` compares ranks, `values.py` and `line_kinds.py` carry kinds,
`module_check.py` (start there) says what must hold of the loss and of each parameter's gradient.
"""
