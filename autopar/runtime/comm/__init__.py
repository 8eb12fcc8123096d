"""Communication between ranks: differentiable placement conversions (start at `convert`; `conversions` has the table of forward
and backward operations), point-to-point messages of pipelines, the heartbeat that notices
dead ranks, and the comparison of what all ranks must have alike (`agreement`). Imports `device`."""
