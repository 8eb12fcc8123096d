"""A plan to look at: `page` writes one self-contained HTML page, `notebook` the small report of Jupyter, `timeline` the
simulated step for Perfetto.

Start at `page`, which gathers what the page shows as plain data; a panel's numbers are those of ``cost_models.step.evaluate`` and
the plan's file, none is computed here. `data/` has the page's markup, style and scripts, and plotly.js, whole and as published
(MIT). Imports ``explain``, ``cost_models`` and ``ir``; ``cli`` imports it, and `Plan` for notebooks when it is shown.
"""
