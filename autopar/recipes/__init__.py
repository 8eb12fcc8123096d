"""What people run by hand, priced as they would run it: each recipe on the software that runs it, the best of its usual knobs.

Start in `by_hand`, the one interface of planning. `recognize` reads the decoder off a captured graph, `software` says who runs a
recipe and how, `graphs` has the decoder as that software writes it (`modules`, captured once: `stored_graphs`), `knobs` lists and
orders configurations, `recipe_price` prices them, `measured` has runs to show beside them. The search knows nothing of this: its
own bounds are `solve.fixed.baselines`, priced with the constants of our own programs.
"""
