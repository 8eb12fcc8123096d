"""Exports a model with `torch.export`, on the meta device, without changing it.

Start with `trace.trace`. `equal_layers` and `layer_span` trace only one of equal layers: the time does not grow with depth;
`guards` refuses what would silently change gradients; `flex` and `experts` replace calls that export cannot shard.
"""
