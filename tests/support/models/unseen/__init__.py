"""Models that no zoo had, as a test of what becomes of a model that nobody here knows."""
