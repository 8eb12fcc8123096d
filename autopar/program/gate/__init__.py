"""The last gate before a program's text is executed: its syntax tree is compared with the lowered program.

Start at `gate.py`. `blocks.py` reads a block's class, `expressions.py` the line of an operation, `calls.py` the calls of blocks,
`attributes.py` the class attributes of a program. Nothing here writes text, and nothing is derived from the text: what may stand
in it comes from the lowered program and from the tables of `operations.py`.
"""
