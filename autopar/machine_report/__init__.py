"""The report of a machine (`autopar calibrate --report`): what is right, and what is measured beside what our constants predict.

Start at `report.py`: it runs cases (`cases.py`) one after another, each in a process of its own, of which a step on one rank is
`step.py`, and compares rates with constants. Imports planning, dryrun and cost_models, and is imported by cli.
"""
