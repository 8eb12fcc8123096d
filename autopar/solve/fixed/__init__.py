"""Fixed configurations: what `validate`, the baselines and a complete ``--force`` price without a search. Start in `candidate`
(`fixed_candidate`, `price_configuration`); `configuration` is what is given, `recomputation` works out its part,
`baselines` are the recipes that people write by hand. Imports the rooms `problem`, `space` and `ilp`.
"""
