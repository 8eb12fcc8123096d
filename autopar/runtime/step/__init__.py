"""One training step on one rank without pipeline stages: arguments in (`inputs`),
micro-batches, recomputation and offloading of saved tensors (`recompute`), results out (`outputs`). Imports `device`, `comm`,
`ops` and `state`."""
