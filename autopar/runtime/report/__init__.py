"""A measured step: per block, collective and stage, beside the plan's prediction.

Start at `measurement.Measurement` (what `parallel.measure` starts) and `step_report.StepReport` (what `parallel.report` returns).
`meter` divides a step's time, `observe` has the private torch interfaces, `compare` sets measured beside
predicted. Imports the other rooms of the runtime.
"""
