"""The hardware that a plan runs on: devices, network links, presets and YAML files of clusters, and properties of the software
(overlap, state layout, constants per stack). Start at `cluster.Cluster`; `mesh_links` maps mesh axes to network links. Imports
`autopar.ir` and `autopar.errors` only."""
