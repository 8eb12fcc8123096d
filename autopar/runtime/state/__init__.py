"""Parameters, buffers and gradients of one rank. Start at `materialize`, which fills a program from full tensors; `layout` says
which shard a rank stores, `fsdp` shards over the data axis, `gradient_buckets` reduces what is replicated. Imports `device` and
`comm`."""
