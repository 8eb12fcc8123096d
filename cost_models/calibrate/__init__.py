"""Calibration: measures this machine and fits a `Cluster` to it (`autopar calibrate`, ``local:N``). Start at `local_cluster`;
`measure` starts one process per rank (`measure_rank`), `fit` turns the timings into device rates and a link. Imports `comm`,
`compute` and `hardware`."""
