"""Frozen data that every other part reads: placements, meshes, graphs, plans. No torch here."""
