"""Plans with the optimizer's state in host memory, for problems of which no plan fits otherwise.

The update of a step then waits for copies of the state, and what is sharded, recomputed and offloaded of activations is searched
without it: so such plans are looked for only where nothing else fits, or where they are asked for."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.solve.space.force import NO_OFFLOAD, Force
from autopar.solve.space.options import SearchOptions


def with_offloaded_optimizer(cluster: Cluster, options: SearchOptions) -> SearchOptions | None:
    """The same search with the optimizer's state in host memory; None where that is no help, or not wanted."""
    useful = cluster.host is not None and optimizer_named(options.optimizer).state_tensors > 0
    if not useful or not options.may_offload_optimizer or options.precision.offload_optimizer:
        return None
    return replace(options, precision=replace(options.precision, offload_optimizer="cpu"))


def with_forced_offload(options: SearchOptions, force: Force) -> SearchOptions:
    """The search with the optimizer's state where `force` says, on the device where it says nothing."""
    device = force.offload_optimizer
    where = "" if device == NO_OFFLOAD else device
    return replace(options, precision=replace(options.precision, offload_optimizer=where), may_offload_optimizer=not device)
