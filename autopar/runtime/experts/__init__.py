"""The experts of a parallel model, which may be placed anew while it trains: `mixtures` finds them, `placement` moves them and
`rebalancing` decides. Imports `state` and `ops`."""
