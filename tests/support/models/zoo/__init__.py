"""A zoo of small models, written after public papers as people write them: unmodified torch modules that compute a loss.

Start with `zoo`. Sizes are tiny; names of classes are those of the papers. `CaptureError`s that they give are of issue 15.
"""
