"""Tables of many points of one grid: structures and prices are made once and kept while they are likely to be asked for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar

from autopar.cost_models.block import BlockCosts
from autopar.cost_models.devices import Device
from autopar.cost_models.hardware import Cluster
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.registry import Registry
from autopar.solve.data_axis import AxisStrategies
from autopar.solve.grid import Point
from autopar.solve.options import SearchOptions
from autopar.solve.problem import Problem, priced, regrouped
from autopar.solve.structure import Structure, structure_of

T = TypeVar("T")

_KEPT = 4
"""Meshes whose tables are kept: two model axes take about 30 MB each."""


class Tables:
    """`graph` at the global batch. A structure serves every number of micro-batches, a price table every state group."""

    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry) -> None:
        self.graph, self.cluster, self.options, self.registry = graph, cluster, options, registry
        self._strategies = AxisStrategies(graph, registry)
        self._structures: OrderedDict[Hashable, Structure] = OrderedDict()
        self._known: dict[Device, dict[str, BlockCosts]] = {}
        self._problems: OrderedDict[Hashable, Problem] = OrderedDict()

    def structure(self, mesh: Mesh) -> Structure:
        if mesh not in self._structures:
            made = structure_of(self.graph, mesh, self.registry, self.options.pins, self._strategies)
            _keep(self._structures, mesh, made)
        return self._structures[mesh]

    def problem(self, point: Point, zeros: tuple[int, ...] | None = None, cluster: Cluster | None = None) -> Problem:
        """The tables of a point. `zeros` are the state shardings to choose from, the options' by default; `cluster` the devices
        of one pipeline stage, where these are not all."""
        cluster = cluster or self.cluster
        key = point.mesh, point.micro_batches, cluster.size, cluster.device
        if key not in self._problems:
            options = self.options
            graph = replace(self.graph, batch=self.graph.batch // point.micro_batches)
            made = priced(
                self.structure(point.mesh), graph, cluster, options.precision, options.optimizer, options.zeros,
                point.micro_batches, self._known.setdefault(cluster.device, {}),
            )  # fmt: skip
            _keep(self._problems, key, made)
        found = regrouped(self._problems[key], point.zero_group)
        if zeros is not None and found.zeros != (0,):
            found = replace(found, zeros=zeros)
        return found


def _keep(kept: OrderedDict[Hashable, T], key: Hashable, made: T) -> None:
    kept[key] = made
    while len(kept) > _KEPT:
        kept.popitem(last=False)
