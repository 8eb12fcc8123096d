"""Seconds of operations on one device: a roofline of kernels, fusion, routed experts, and collectives inside operations. Start at
`operations.node_cost`. Imports `comm`, `hardware`, `tensors` and `autopar.rules`."""
