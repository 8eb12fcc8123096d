"""What people run by hand, priced as they would run it: each recipe on the software that it is run with, the best of its usual
knobs.

Start in `by_hand`. `recognize` reads the decoder off a captured graph, `knobs` lists and orders configurations, `recipe_price`
prices them, `published` finds the measured runs of the same model on the same cluster. The search knows nothing of this: its own
bounds are `solve.fixed.baselines`, priced with the constants of our own programs.
"""
