"""``plan.json``: `document` is its schema, `codec` writes classes of the IR by their annotations, `plan_file` reads and writes.

Start with `plan_file.Plan`. Imports the rest of `ir`.
"""
