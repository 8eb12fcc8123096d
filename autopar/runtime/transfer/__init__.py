"""Weight transfer from a job that trains to one that generates: `send_weights` and `receive_weights`. Start at `transfer`.

`weight_layout` says which part of each tensor a rank holds, `vllm_layout` that of vLLM, `transfer_plan` who sends what to whom,
in which rounds, and the lower bounds; `connection` joins both jobs. Imports device, comm, state."""
