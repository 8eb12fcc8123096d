"""The settings that a software, or a recipe that people write by hand, is searched over: those that divide model, batch and
cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from autopar.cost_models.hardware.cluster import Cluster
from autopar.software.configuration import Configuration, Workload
from autopar.solve.space.grid import devices_per_node
from autopar.solve.space.meshes import divisors

LARGEST_MICRO_BATCH = 128
_MOST_STAGES = 64
_MOST_EXPERTS = 64
_CHUNKS = {"zb-h1": (1,), "zbv": (2,)}
"""Chunks of a stage that a schedule with split backwards has."""
_CHUNK_TOKENS = 4096
"""Context parallelism keeps at least so many tokens of a sequence on a rank, as in published runs."""


@dataclass(frozen=True, slots=True)
class Space:
    """Degrees that a software has (the tensor axis stays in a node), and the other values that are tried. `zero`: ZeRO stages of
    runs with several data ranks; `hybrid`: state is sharded over groups too (HSDP); `most_chunks`: of a stage (0: any number);
    `uneven`: chunks may differ by a layer; `schedules`: of pipelines;
    `least_tensor`: a recipe's narrowest axis."""

    zero: tuple[int, ...] = (3, 2)
    recompute: tuple[str, ...] = ("none", "full")
    tensor: bool = False
    pipeline: bool = False
    context: bool = False
    experts: bool = False
    hybrid: bool = False
    most_chunks: int = 0
    uneven: bool = False
    least_tensor: int = 1
    offload: tuple[bool, ...] = (False,)
    schedules: tuple[str, ...] = ("1f1b",)

    def configurations(self, work: Workload) -> Iterator[Configuration]:
        """Every setting that divides model, batch and cluster."""
        size, decoder = work.cluster.size, work.decoder
        node = min(devices_per_node(work.cluster), size)
        for tensor in divisors(node) if self.tensor else [1]:
            heads = decoder is not None and (decoder.heads % tensor or decoder.kv_heads % tensor)
            if tensor < self.least_tensor or heads or size % tensor:
                continue
            for stages, virtual in self._pipelines(work, size // tensor):
                ranks = size // (tensor * stages)
                for context in self._contexts(work, ranks):
                    if work.batch % (ranks // context):
                        continue
                    for experts in self._expert_degrees(work, ranks * (tensor if work.whole_experts else 1)):
                        yield from self._batching(work, Configuration(tensor, context, experts, stages, virtual), node)

    def _pipelines(self, work: Workload, ranks: int) -> Iterator[tuple[int, int]]:
        yield 1, 1
        for stages in divisors(ranks) if self.pipeline else []:
            if not 1 < stages <= min(work.layers, _MOST_STAGES):
                continue
            deep = {-(-work.layers // stages), -(-(work.layers + 2) // stages)}
            for each in sorted({size for layers in deep for size in divisors(layers)}):
                virtual = -(-work.layers // (stages * each))
                chunks = stages * virtual
                whole = work.layers % chunks == 0 or (work.layers + 2) % chunks == 0
                whole = whole or ((virtual == 1 or self.uneven) and chunks <= work.layers)
                if whole and (not self.most_chunks or virtual <= self.most_chunks):
                    yield stages, virtual

    def _contexts(self, work: Workload, ranks: int) -> list[int]:
        decoder = work.decoder
        if not self.context or decoder is None or decoder.latent is not None:
            return [1]
        return [each for each in divisors(ranks) if each <= max(1, decoder.seq // _CHUNK_TOKENS) and decoder.seq % each == 0]

    def _expert_degrees(self, work: Workload, ranks: int) -> list[int]:
        if not self.experts or work.decoder is None or not work.decoder.experts:
            return [1]
        return [degree for degree in divisors(work.decoder.experts) if ranks % degree == 0 and degree <= _MOST_EXPERTS]

    def _batching(self, work: Workload, degrees: Configuration, node: int) -> Iterator[Configuration]:
        data = degrees.data(work.cluster.size)
        each = work.batch // data
        sharding = list(self._sharding(work.cluster, degrees, data, node))
        schedules = [
            name for name in self.schedules if name == "1f1b" or (degrees.stages > 1 and degrees.virtual in _CHUNKS[name])
        ]
        recompute = self.recompute if work.sequence_parallel else [word for word in self.recompute if word != "selective"]
        for micro in divisors(each):
            count = each // micro
            if micro > LARGEST_MICRO_BATCH or (degrees.virtual > 1 and count % degrees.stages) or count < degrees.stages:
                continue
            for zero, group in sharding:
                for word in recompute:
                    for offload, schedule in product(self.offload, schedules):
                        one = replace(degrees, micro=micro, zero=zero, group=group, recompute=word)
                        yield replace(one, offload=offload, schedule=schedule)

    def _sharding(self, cluster: Cluster, degrees: Configuration, data: int, node: int) -> Iterator[tuple[int, int]]:
        ranks = data * degrees.context
        if ranks == 1:
            yield 0, 0
            return
        yield from ((zero, 0) for zero in self.zero)
        near = node // degrees.tensor
        if self.hybrid:
            yield from ((3, group) for group in (near, 8 * near) if 1 < group < ranks and ranks % group == 0)
        elif cluster.state_layout.owners_broadcast and near < data:
            yield 1, near  # InternEvo: parallel.zero1.size, a node by default


def recipe_space(recipe: str) -> Space:
    """The knobs of a recipe that people write by hand: ``ddp``, ``fsdp``, ``fsdp_tp``, ``megatron``."""
    again = ("none", "products", "full")
    return {
        "ddp": Space(zero=(0,), recompute=again),
        "fsdp": Space(recompute=again, hybrid=True),
        "fsdp_tp": Space(recompute=again, hybrid=True, tensor=True, least_tensor=2),
        "megatron": Space((1,), ("none", "selective", "everything"), tensor=True, pipeline=True, context=True, experts=True),
    }[recipe]
