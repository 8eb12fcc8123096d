"""The factor notation of sharding rules: `rule` is what an operation declares, `notation` parses a line and fits it to shapes,
`line_text` helps to write lines that depend on shapes, `common_factors` finds how a reshape views one shape as another.

Start with `rule.Rule` and `notation.parse_rule`. Imports `ir` only.
"""
