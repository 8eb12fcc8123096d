"""The simulated training step: what a plan costs in seconds and bytes on a cluster.

Start at `evaluate`, which lists the models in their order; `cost_models.events` describes the step that they play. `block_costs`
and `call_trace` price one block; `recompute`, `block_memory`, `memory_events` and `stage_memory` its memory; `streams`,
`micro_batch_clock` and `chunk_costs` overlap its FSDP communication; `stage_devices`, `pipeline_clock` and `stage_times` put
pipeline stages together. Imports the folders of ``cost_models`` beside it (except `breakdown` and `calibrate`),
``autopar.schedules`` and ``autopar.ir``; the solver imports it.
"""
