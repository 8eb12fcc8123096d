"""How operations carry types: the checker's own table, written apart from the compiler's rules, each row proven by execution.

Start at `carry.py`: what a row is, and how kinds of operands become those of results. `elements.py`, `views.py`, `products.py`,
`indexing.py` and `images.py` have the rows, `lemmas.py` the functions that compute an operation by another algorithm, `table.py`
finds them. Imports `checker.shards`.
"""
