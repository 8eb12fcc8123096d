"""The way from the sharding rules of `operations` to the strategies of an operation on a mesh axis.

Start with `expand`, which turns rules into strategies; `registry` has the rules, `conversions` lists the placement conversions
(redistribute), `localize` turns an operation on global shapes into the one of a rank. Imports `ir`, `operations` and `errors`.
"""
