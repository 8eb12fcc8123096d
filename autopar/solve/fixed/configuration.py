"""A fixed configuration: degrees, state sharding, recomputation and pipeline are given, not searched."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import ClusterError
from autopar.ir.mesh import DATA_AXIS, Axis, Mesh
from autopar.ir.plan import Precision
from autopar.solve.space.force import Force

TENSOR_AXIS = "tp"


@dataclass(frozen=True, slots=True)
class FixedConfiguration:
    """A configuration as people write it by hand. The data degree is what the cluster leaves. `zero_group`: state is sharded over
    so many neighbours (0: all data ranks). `sliced_experts`: the tensor axis cuts inside experts too, else it takes part in
    dealing them out. `recompute` is ``none``, ``modules`` (those of `modules`), ``selective`` (the attention's core),
    ``products`` (all but attention and every second product of a layer), ``full`` (layers, what the backward needs: torch's
    checkpoint) or ``everything`` (layers from end to end: checkpoints that run all of it again). It is for `recomputed_blocks`,
    or for all that are called more than once. `modules` has names of Megatron's ``--recompute-modules``
    (`fixed.recomputation.MODULES`). All that `offloaded_blocks` save lies in host memory until their backward. `layers` are those
    of each pipeline chunk, where they are not dealt evenly."""

    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    virtual: int = 1
    zero: int = 0
    zero_group: int = 0
    sliced_experts: bool = True
    micro_batches: int = 1
    recompute: str = "none"
    recomputed_blocks: tuple[str, ...] = ()
    modules: tuple[str, ...] = ("layernorm", "mla_up_proj")
    offloaded_blocks: tuple[str, ...] = ()
    schedule: str = "1f1b"
    layers: tuple[int, ...] = ()
    weight_versions: int = 1
    precision: Precision = Precision()
    optimizer: str = "adamw"


def configuration_of(force: Force, precision: Precision, optimizer: str) -> FixedConfiguration:
    """The configuration that a whole `Force` spells out."""
    degrees = force.degrees
    return FixedConfiguration(
        tp=degrees["tp"],
        sequence_parallel=bool(degrees["sequence_parallel"]) and degrees["tp"] > 1,
        pp=degrees["pp"],
        virtual=degrees.get("virtual", 1),
        zero=degrees["zero"],
        zero_group=degrees["zero_group"],
        micro_batches=degrees["micro_batches"],
        recompute=force.recompute,
        schedule=force.schedule or "1f1b",
        weight_versions=degrees.get("weight_versions", 1),
        precision=precision,
        optimizer=optimizer,
    )


def mesh_of_stage(cluster: Cluster, fixed: FixedConfiguration) -> Mesh:
    """The mesh of one pipeline stage. Ranks of one tensor group are neighbours."""
    model = fixed.tp * fixed.pp
    if cluster.size % model:
        raise ClusterError(
            f"tp={fixed.tp}, pp={fixed.pp} do not divide the {cluster.size} devices of {cluster.name}: force divisors"
        )
    axes = [Axis(DATA_AXIS, cluster.size // model)]
    if fixed.tp > 1:
        axes.append(Axis(TENSOR_AXIS, fixed.tp))
    return Mesh(tuple(axes))
