"""The cost of a plan in its parts, for reports: every operation and collective with its seconds in a step.

Start at `cost_breakdown`; `step_timeline` gives the spans of a step, and the times of each action of a schedule,
`gradient_exchange` compares ways to sum gradients. Imports the other folders of ``cost_models``; ``autopar.explain`` and
``autopar.cli`` read its results.
"""
