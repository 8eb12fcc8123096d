"""Plans made without the solver: written by hand, drawn at random, pipelines, and the solver's with forced choices."""
