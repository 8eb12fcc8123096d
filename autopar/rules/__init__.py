"""Sharding rules: one line of factor notation per operation, and the strategies of an operation on a mesh axis that follow.

Start with `rule.Rule` and `table/aten.py`; `expand` turns rules into strategies, `conversions` lists the placement conversions
(redistribute), `localize` turns an operation on global shapes into the one of a rank. Imports `ir` and `errors`.
"""
