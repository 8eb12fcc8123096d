"""Decoders in sizes, and their graphs as each software writes them: captured once per kind (`stored_graphs`), with sizes and
depth put in afterwards (`graphs`). `decoder` has the sizes, `modules` the module that is captured, `recognize` reads the sizes
off a captured graph or a Hugging Face config. Imports capture, and nothing of the search.
"""
