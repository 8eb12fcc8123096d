"""Checkpoints that outlive the plan. Start at `entry`: `parallel.save` and `parallel.load`; `saving` and `loading` do the work on
what `held` finds in a model.

A checkpoint is a folder (`folders`) of one tensor file for each rank and a file of Python objects (`tensor_file`,
`random_state`), and a manifest of it all with checksums (`manifest`). Which rank writes and reads which part of a tensor is
decided by the planners of torch.distributed.checkpoint. Imports device, comm and state."""
