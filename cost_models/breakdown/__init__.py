"""The cost of a plan in its parts, for reports: every operation and collective with its seconds in a step, and its formulas.

Start at `cost_breakdown`; `cost_formulas` writes out the formulas of one operation or collective with their numbers,
`pipeline_timeline` gives the times of each action of a schedule, `gradient_exchange` compares ways to sum gradients. Imports the
other folders of ``cost_models``; ``autopar.explain`` and ``autopar.cli`` read its results.
"""
