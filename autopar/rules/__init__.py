"""Sharding rules: one line of factor notation per operation, and the strategies that come from it on a mesh axis."""
