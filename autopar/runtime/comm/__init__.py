"""Communication between ranks: differentiable placement conversions (start at `convert`; `conversions` has the table of forward
and backward operations, `coalesced` the flat collectives), point-to-point messages of pipelines, and the heartbeat that notices
dead ranks. Imports `device`."""
