"""One configuration of a run in words that all software shares, and the workload that it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.decoders.decoder import Architecture
from autopar.decoders.graphs import RunOptions
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.fixed.recomputation import MODULES


@dataclass(frozen=True, slots=True)
class Workload:
    """A decoder as a software writes it, a batch of sequences, and a cluster with that software's constants. `options`: what else
    of the run is in the graph, but for what a `Configuration` says; `whole_experts`: the tensor axis does not cut inside experts;
    `sequence_parallel`: the software has it, and selective recomputation, which came with it (arXiv 2205.05198). `graph`: a model
    that is no known decoder, as it was captured (then `decoder` is None)."""

    decoder: Architecture | None
    layers: int
    batch: int
    cluster: Cluster
    precision: Precision
    optimizer: str = "adamw"
    options: RunOptions = RunOptions()
    whole_experts: bool = False
    sequence_parallel: bool = True
    graph: Graph | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a run is set to.

    tensor, context, experts: degrees of tensor, context and expert parallelism; the data degree is what the devices leave.
    stages, virtual, schedule: of the pipeline, with chunks per stage.
    zero, group: ZeRO stage (FSDP is 3, or 2 where weights stay gathered after the forward), over so many data ranks (0: all;
        fewer: HSDP).
    micro: sequences of a micro-batch on a data rank.
    recompute: as `FixedConfiguration.recompute`.
    offload: the optimizer's state lies in host memory.
    sequence_parallel: values between layers are cut along the sequence over the tensor axis.
    share: of the layers, evenly spread, that are recomputed.
    modules: what of each layer is recomputed, with recompute ``modules`` (`fixed.recomputation.MODULES`, and ``moe_act``).
    host_layers: so many layers have all that they save in host memory until their backward.
    layers: of each chunk, where they are not dealt evenly.
    """

    tensor: int = 1
    context: int = 1
    experts: int = 1
    stages: int = 1
    virtual: int = 1
    zero: int = 0
    group: int = 0
    micro: int = 1
    recompute: str = "none"
    schedule: str = "1f1b"
    offload: bool = False
    sequence_parallel: bool = True
    share: float = 1.0
    modules: tuple[str, ...] = ()
    host_layers: int = 0
    layers: tuple[int, ...] = ()

    def data(self, size: int) -> int:
        """The data degree on `size` devices."""
        return size // (self.tensor * self.stages * self.context)

    def micro_batches(self, batch: int, size: int) -> int:
        """The micro-batches of a step, each of `micro` sequences on every data rank."""
        return max(1, -(-batch // (self.data(size) * self.micro)))

    def options(self, work: Workload) -> RunOptions:
        """Return the options of the run that change the graph of the model."""
        return replace(
            work.options,
            context=self.context,
            ep=self.experts,
            recompute_cast=work.options.float8 and self.recompute == "products",
            recompute_activation=self.recompute == "modules" and "moe_act" in self.modules,
        )

    def fixed(self, work: Workload) -> FixedConfiguration:
        """The fixed configuration that the evaluator prices, without context and expert parallelism, which are in the graph."""
        return FixedConfiguration(
            tp=self.tensor,
            sequence_parallel=self.tensor > 1 and work.sequence_parallel and self.sequence_parallel,
            sliced_experts=not work.whole_experts,
            pp=self.stages,
            virtual=self.virtual,
            schedule=self.schedule,
            layers=self.layers,
            zero=self.zero,
            zero_group=self.group,
            micro_batches=self.micro_batches(work.batch, work.cluster.size),
            recompute=self.recompute,
            modules=tuple(name for name in self.modules if name in MODULES),
            precision=replace(work.precision, offload_optimizer="cpu") if self.offload else work.precision,
            optimizer=work.optimizer,
        )

    def describe(self, work: Workload) -> str:
        """``tp=4 pp=4 x 5 chunks cp=2 dp=2, ZeRO-1, sequence parallel, 64 micro-batches of 1``."""
        size = work.cluster.size
        pipeline = f"pp={self.stages}" + f" x {self.virtual} chunks" * (self.virtual > 1)
        pipeline += f" ({self.schedule})" * (self.schedule != "1f1b")
        degrees = (
            [f"tp={self.tensor}"] * (self.tensor > 1)
            + [pipeline] * (self.stages > 1)
            + [f"cp={self.context}"] * (self.context > 1)
            + [f"ep={self.experts}"] * (self.experts > 1)
            + [f"dp={self.data(size)}"]
        )
        count = self.micro_batches(work.batch, size)
        again = {"everything": "full", "products": "selective", "modules": " and ".join(self.modules)}.get(
            self.recompute, self.recompute
        )
        parts = [
            " ".join(degrees),
            *([f"ZeRO-{self.zero}"] * (self.zero > 0)),
            *([f"state in groups of {self.group}"] * bool(self.group)),
            *(["sequence parallel"] * self.fixed(work).sequence_parallel),
            *([f"{count} micro-batches of {self.micro}"] * (count > 1)),
            *([f"{again} recomputation" + f" of {self.share:.0%} of the layers" * (self.share < 1)] * (again != "none")),
            *(["optimizer state in host memory"] * self.offload),
            *([f"activations of {self.host_layers} layers in host memory"] * bool(self.host_layers)),
        ]
        return ", ".join(parts)
