"""Optimizers: the state tensors that each keeps per parameter, and the seconds of its update."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.device_specs import AxisLink, Device
from autopar.cost_models.state.state_group import MatrixWork, StateGroup
from autopar.cost_models.tensors.sizes import itemsize
from autopar.errors import AutoparError
from autopar.ir.plan import Precision


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer. (The checker of programs counts its state by a table of its own,
    `checker.state_bytes`; `dryrun.run.make_optimizer` makes it.)

    state_tensors: tensors of the master weight's size that it keeps per parameter (AdamW: both moments).
    memory_accesses: reads and writes of master-sized tensors in one update.
    newton_schulz_steps: of the update of a matrix, which needs it whole (0: the optimizer is elementwise).
    rest_tensors: state tensors of parameters that are no matrices, of another optimizer (0: as `state_tensors`).
    """

    name: str
    state_tensors: int
    memory_accesses: int
    newton_schulz_steps: int = 0
    rest_tensors: int = 0

    def state_bytes(self, master_bytes: int) -> int:
        """Return the bytes of state per parameter, beside a master weight of `master_bytes`."""
        return self.state_tensors * master_bytes


_OPTIMIZERS = {
    each.name: each
    for each in (
        Optimizer("adamw", 2, 20),
        Optimizer("adam", 2, 18),
        Optimizer("sgd", 0, 3),
        Optimizer("momentum", 1, 6),
        Optimizer("adagrad", 1, 11),
        Optimizer("rmsprop", 1, 11),
        Optimizer("muon", 1, 17, newton_schulz_steps=5, rest_tensors=2),
    )
}
"""Accesses count those of torch's foreach implementation (each ``_foreach_*`` reads and writes memory once): adamw = decay 2,
lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4. muon, with AdamW for what is no matrix = both lerps 6, decay and zeros
6, casts and copies around the exchange 3, update 2."""


def optimizer_named(name: str) -> Optimizer:
    """Return the optimizer of this name; an unknown one (of a plan file or a published run) costs as adamw."""
    return _OPTIMIZERS.get(name) or replace(_OPTIMIZERS["adamw"], name=name)


def check_optimizer(name: str) -> None:
    """Raise AutoparError for the name of an optimizer whose state has no known size."""
    if name not in _OPTIMIZERS:
        raise AutoparError(
            f"optimizer {name[:40]!r} is not known: write that of {', '.join(_OPTIMIZERS)} which keeps as much state for each "
            "parameter (two tensors: adamw; one, as Lion: momentum; none: sgd)"
        )


def optimizer_seconds(
    group: StateGroup,
    zero: int,
    data_size: int,
    device: Device,
    precision: Precision,
    optimizer: Optimizer,
    memory_accesses: float = 0.0,
) -> float:
    """Return the seconds of one update of the local shard, which is bound by memory bandwidth. `memory_accesses` replaces the
    optimizer's own count where the software's is known (0: it is not). A CPU updates tensor by tensor, with a fixed cost per pass
    over a tensor (about two accesses)."""
    count = group.trainable / (data_size if zero else 1)
    streamed_bytes = count * (memory_accesses or optimizer.memory_accesses) * itemsize(precision.master)
    seconds = streamed_bytes / (device.update_bytes_per_second or device.bandwidth_bytes_per_second * device.bandwidth_fraction)
    launches = group.tensors * optimizer.memory_accesses / 2 if device.kind == "cpu" else 0.0
    return seconds + launches * (device.update_seconds or device.launch_seconds)


def matrix_update_seconds(
    work: MatrixWork, copies: int, owners: AxisLink, device: Device, optimizer: Optimizer
) -> float:
    """Return the seconds in which whole matrices are updated, each by one of the `owners`, which are all ranks of the stage
    (runtime `owned_matrices`): its products, and the exchange of the momenta to the owners and of the updates back, to so many
    copies of the state. Model axes are taken to shard every matrix. Those of many groups travel together, so that latencies count
    for none."""
    if not optimizer.newton_schulz_steps or not work.flops:
        return 0.0
    flops = optimizer.newton_schulz_steps * work.flops / owners.size
    nothing = collective_seconds("all_to_all", 0.0, owners)
    sent_bytes = (work.elements * itemsize(MATRIX_DTYPE) * times for times in (1, copies))
    exchange = sum(collective_seconds("all_to_all", each, owners) - nothing for each in sent_bytes)
    return flops / device.product_flops_per_second(MATRIX_DTYPE) + exchange


MATRIX_DTYPE = "bfloat16"
"""In which `torch.optim.Muon` multiplies matrices, and the runtime sends them."""
