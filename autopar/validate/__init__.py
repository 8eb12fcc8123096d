"""Published runs beside predictions: a row of a table -> its model -> graph -> fixed configuration -> evaluator; and fits.

Start with `price.Session`. `architectures` has the decoder of a row, `configuration` how it was parallelized, `summary` and
`report` the errors, `constants` fits software stacks. Planning imports `recipes`, and not this.
"""
