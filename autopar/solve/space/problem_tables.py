"""A cache of `Problem` tables for the points of one grid: points of one mesh share a structure, and state groups share prices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.rules.registry import Registry
from autopar.solve.problem.data_axis import AxisStrategies
from autopar.solve.problem.pins import pins_of, why_no_axis
from autopar.solve.problem.problem import Problem, price_structure, with_zero_group
from autopar.solve.problem.structure import FixedPlacements, Structure, structure_of
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.options import SearchOptions

T = TypeVar("T")

_Caches = dict[bool, OrderedDict[Hashable, T]]

_CACHED = {False: 16, True: 4}
"""Tables in the cache, of meshes with two model axes (about 30 MB each) or not."""


class ProblemTables:
    """The tables of one grid. `graph` is at the global batch. A structure serves every number of micro-batches, a price table
    every state group."""

    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, registry: Registry) -> None:
        self.graph, self.cluster, self.options, self.registry = graph, cluster, options, registry
        self._strategies = AxisStrategies(graph, registry)
        self._pins = pins_of(graph, options.pins)
        self._refusals: dict[Mesh, str] = {}
        self._structures: _Caches[Structure] = {wide: OrderedDict() for wide in _CACHED}
        self._costs: dict[Device, dict[str, BlockCosts]] = {}
        self._problems: _Caches[Problem] = {wide: OrderedDict() for wide in _CACHED}

    def structure(self, mesh: Mesh) -> Structure:
        """The choices on a mesh, without prices."""
        structures = self._structures[_is_wide(mesh)]
        if mesh not in structures:
            options = self.options
            fixed = FixedPlacements(options.stored, options.placed)
            structure = structure_of(self.graph, mesh, self._strategies, self._pins, fixed)
            _remember(structures, mesh, structure, _CACHED[_is_wide(mesh)])
        return structures[mesh]

    def refusal(self, mesh: Mesh) -> str:
        """Say why no plan on a mesh obeys the pins; empty where one may."""
        if mesh not in self._refusals:
            no_axis = why_no_axis(self._pins, mesh)
            self._refusals[mesh] = no_axis or (self.structure(mesh).refusal if self._pins else "")
        return self._refusals[mesh]

    def refusals(self) -> list[str]:
        """What was said of meshes that cannot obey the pins, those first that have the axes of all pins."""
        meshes = [mesh for mesh, text in self._refusals.items() if text]
        return [self._refusals[mesh] for mesh in sorted(meshes, key=lambda mesh: bool(why_no_axis(self._pins, mesh)))]

    def problem(self, point: GridPoint, zeros: tuple[int, ...] | None = None, cluster: Cluster | None = None) -> Problem:
        """The tables of a point. `zeros`: the allowed state shardings, by default those of the options. `cluster`: the
        devices of one pipeline stage, where these are not all, or other prices."""
        cluster = cluster or self.cluster
        key = point.mesh, point.micro_batches, cluster.size, cluster.device, cluster.links
        problems = self._problems[_is_wide(point.mesh)]
        if key not in problems:
            options = self.options
            graph = replace(self.graph, batch=self.graph.batch // point.micro_batches)
            problem = price_structure(
                self.structure(point.mesh),
                graph,
                cluster,
                options.precision,
                options.optimizer,
                zeros=options.zeros,
                micro_batches=point.micro_batches,
                known_costs=self._costs.setdefault(cluster.device, {}),
            )
            _remember(problems, key, problem, _CACHED[_is_wide(point.mesh)])
        tables = with_zero_group(problems[key], point.zero_group)
        if zeros is not None and tables.zeros != (0,):
            tables = replace(tables, zeros=zeros)
        return tables


def _is_wide(mesh: Mesh) -> bool:
    return len(mesh.axes) > 2


def _remember(cache: OrderedDict[Hashable, T], key: Hashable, table: T, most: int) -> None:
    """Cache an entry, first in, first out: the search goes through the grid mesh by mesh."""
    cache[key] = table
    while len(cache) > most:
        cache.popitem(last=False)
