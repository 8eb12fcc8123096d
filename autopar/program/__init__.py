"""Writes the lowered program as readable Python text, loads it as a module, and exports it as a folder that needs torch only.

Start at `build.py`: from a plan to a running program in one function, and the text of the module;
`block_source.py` that of one block, `expressions.py` that of one operation. Imports `ir`, `rules` and `passes`; the text imports
`autopar.runtime`, this package does not (it only copies it into an export).
"""
