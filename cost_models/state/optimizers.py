"""Elementwise optimizers: the state tensors that each keeps per parameter, and the seconds of its update."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.state.state_group import StateGroup
from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An elementwise optimizer.

    state_tensors: tensors of the master weight's size that it keeps per parameter (AdamW: both moments).
    memory_accesses: reads and writes of master-sized tensors in one update.
    """

    name: str
    state_tensors: int
    memory_accesses: int


def optimizer_named(name: str) -> Optimizer:
    """The optimizer of this name; an unknown one costs as adamw. Accesses count those of torch's foreach implementation (each
    ``_foreach_*`` reads and writes memory once): adamw = decay 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4."""
    known = {
        "adamw": Optimizer("adamw", 2, 20),
        "adam": Optimizer("adam", 2, 18),
        "sgd": Optimizer("sgd", 0, 3),
        "momentum": Optimizer("momentum", 1, 6),
        "adagrad": Optimizer("adagrad", 1, 11),
        "rmsprop": Optimizer("rmsprop", 1, 11),
    }
    return known.get(name, Optimizer(name, 2, 20))


def optimizer_seconds(
    group: StateGroup,
    zero: int,
    data_size: int,
    device: Device,
    precision: Precision,
    optimizer: Optimizer,
    memory_accesses: float = 0.0,
) -> float:
    """Seconds of one update of the local shard, which is bound by memory bandwidth. `memory_accesses` replaces the optimizer's
    own count where the software's is known (0: it is not). A CPU updates tensor by tensor, with a fixed cost per pass over a
    tensor (about two accesses)."""
    count = group.trainable / (data_size if zero else 1)
    streamed_bytes = count * (memory_accesses or optimizer.memory_accesses) * itemsize(precision.master)
    seconds = streamed_bytes / (device.update_bytes_per_second or device.bandwidth_bytes_per_second * device.bandwidth_fraction)
    launches = group.tensors * optimizer.memory_accesses / 2 if device.kind == "cpu" else 0.0
    return seconds + launches * (device.update_seconds or device.launch_seconds)
