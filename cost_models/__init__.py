"""Seconds and bytes of a plan on a cluster; each formula carries its source. Rooms from the bottom: `formulas`, `hardware`,
`tensors`, `comm`, `compute`, `state`, `step`, and `calibrate`, which measures a machine; start at `step.evaluate`, the
ground-truth cost of a plan. Imports `autopar.ir`, `autopar.rules` and `autopar.schedules`, never the solver."""
