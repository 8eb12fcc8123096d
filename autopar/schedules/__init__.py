"""Pipeline schedules as data: a `Schedule` is a tuple of actions for each pipeline stage. Named schedules are the files of
`builders`; start in `pipeline_schedule` (`schedule_of`). `check` verifies a schedule, `communicate` adds its transfers,
`clock` runs it with real times, `synthesis` has what finding a new one takes. Imports `ir` only.
"""
