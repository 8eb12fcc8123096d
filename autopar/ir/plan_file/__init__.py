"""``plan.json``: `document` is its schema, `codec` converts graphs and plans to it and back, `plan_file` reads and writes.

Start with `plan_file.Plan`. Imports the rest of `ir`.
"""
