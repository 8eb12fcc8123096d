"""Rewrites a captured graph and a plan into the program of one rank: one readable list of named passes."""
