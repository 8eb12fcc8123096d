"""The price of configurations of one workload, by the evaluator; and the least that one can take, from the evaluator's own
traces of its layers, which many configurations share: it orders them and spares the evaluation of most."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil, floor

from autopar.cost_models.events.memory_terms import held_bytes
from autopar.cost_models.events.state_transfers import step_transfers, transfer_seconds
from autopar.cost_models.state.optimizers import optimizer_named
from autopar.cost_models.step.block_costs import BlockCosts
from autopar.cost_models.step.call_trace import CallTrace
from autopar.cost_models.step.evaluate import Evaluation, SharedCosts, evaluate, stage_traces
from autopar.cost_models.step.pipeline_clock import micro_batches_in_flight
from autopar.decoders.graphs import OFFLOADED, RECOMPUTED, graph_of, with_marked_layers
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.plan import Candidate, Pipeline
from autopar.rules.registry import Registry, default_registry
from autopar.software.configuration import Configuration, Workload
from autopar.solve.fixed.candidate import BlockPlacements, fixed_candidate, place_blocks


@dataclass(frozen=True, slots=True)
class PricedConfiguration:
    """One configuration with its cost. `margin`: see `Pricer`."""

    configuration: Configuration
    candidate: Candidate
    evaluation: Evaluation
    margin: bool = False

    @property
    def fits(self) -> bool:
        """Whether it is within the memory, with the margin or without."""
        return self.evaluation.fits if self.margin else self.evaluation.can_run

    @property
    def needed_bytes(self) -> float:
        """The memory that a device has to have for it to fit."""
        stages = self.evaluation.stage_memory
        if self.margin:
            return max(each.peak_bytes * each.capacity_bytes / each.budget_bytes for each in stages)
        return max(each.least_bytes for each in stages)


@dataclass(frozen=True, slots=True)
class Least:
    """The least that a configuration takes: seconds of a step, and bytes of a device of the first stage."""

    seconds: float
    bytes: float


@dataclass(slots=True)
class Pricer:
    """Prices the configurations of one workload, which share graphs, placements and the costs of blocks. `evaluated` counts.

    margin: what fits leaves the memory margin of the cluster, as what is recommended has to. Else a configuration fits that may
        run: experts try, and one that would reserve more than there is runs all the same while its tensors fit
        (`hardware.allocator`).
    """

    work: Workload
    margin: bool = False
    evaluated: int = 0
    _placed: dict[object, BlockPlacements] = field(default_factory=dict)
    _graphs: dict[object, Graph] = field(default_factory=dict)
    _costs: dict[object, SharedCosts] = field(default_factory=dict)
    _layer_costs: dict[object, SharedCosts] = field(default_factory=dict)
    _layers: dict[object, _LayerTraces] = field(default_factory=dict)

    def price(self, configuration: Configuration) -> PricedConfiguration:
        """One configuration. AutoparError where it cannot be placed."""
        self.evaluated += 1
        graph, candidate = self.candidate(configuration)
        costs = self._shared_costs(configuration, graph).of(candidate)
        found = evaluate(graph, candidate, self.work.cluster, self.work.optimizer, costs)
        return PricedConfiguration(configuration, candidate, found, self.margin)

    def candidate(self, configuration: Configuration) -> tuple[Graph, Candidate]:
        """The graph of a configuration at its batch, and its candidate. Degrees of context and experts share placements; tensor
        degrees do not, since one may cut what another leaves whole."""
        graph, fixed = self.graph(configuration), configuration.fixed(self.work)
        fixed = replace(fixed, recomputed_blocks=_marked(graph, RECOMPUTED), offloaded_blocks=_marked(graph, OFFLOADED))
        if configuration.share < 1 and not fixed.recomputed_blocks:
            fixed = replace(fixed, recompute="none")
        key = self._alike(configuration)
        if key not in self._placed:
            self._placed[key] = place_blocks(graph, fixed, self._registry)
        return graph, fixed_candidate(graph, self.work.cluster, fixed, self._placed[key])

    def _alike(self, each: Configuration) -> tuple[object, ...]:
        """Configurations with the same placements."""
        sequence_parallel = each.fixed(self.work).sequence_parallel
        return each.tensor, each.context > 1, each.experts > 1, sequence_parallel, each.share < 1, each.host_layers > 0

    def graph(self, configuration: Configuration) -> Graph:
        """The graph, with the degrees of context and expert parallelism in it."""
        work, key = self.work, self._graph_key(configuration)
        if key not in self._graphs:
            if work.decoder is None:
                assert work.graph is not None
                graph = work.graph
            else:
                graph = graph_of(work.decoder, work.layers, work.precision.compute, configuration.options(work))
            if configuration.share < 1:
                graph = with_marked_layers(graph, configuration.share)
            if configuration.host_layers:
                graph = with_marked_layers(graph, configuration.host_layers / work.layers, OFFLOADED)
            self._graphs[key] = replace(graph, batch=work.batch * configuration.context)
        return self._graphs[key]

    def _graph_key(self, configuration: Configuration) -> object:
        return configuration.options(self.work), configuration.share, configuration.host_layers

    @property
    def _registry(self) -> Registry:
        return default_registry(published=self.work.decoder is not None)

    def _shared_costs(self, configuration: Configuration, graph: Graph) -> SharedCosts:
        key = self._graph_key(configuration)
        if key not in self._costs:
            self._costs[key] = SharedCosts(graph, self.work.cluster)
        return self._costs[key]

    def least(self, configuration: Configuration) -> Least:
        """Return the least that the configuration takes. AutoparError where it cannot be placed."""
        work = self.work
        layers = self._layer_traces(configuration)
        fixed = configuration.fixed(work)
        count, stages = fixed.micro_batches, configuration.stages
        chunk = max(1, floor(work.layers / (stages * configuration.virtual)))
        share = 1 / stages
        busy = count * share * (layers.seconds * work.layers + layers.outer_seconds)
        ramp = (stages - 1) * chunk * layers.seconds if configuration.schedule == "1f1b" else 0.0
        state, communication = layers.state(configuration, work)
        exchange = work.layers * share * communication
        in_flight = self._in_flight(configuration, count)
        saved = layers.saved_bytes * min(work.layers, ceil(work.layers / (stages * configuration.virtual)) * in_flight)
        return Least(max(busy + ramp, exchange), work.layers * share * state + saved + work.cluster.device.base_bytes)

    def _in_flight(self, configuration: Configuration, count: int) -> int:
        """Model chunks of the first stage whose tensors are held at once."""
        pipeline = Pipeline(configuration.stages, configuration.virtual, configuration.schedule)
        if configuration.stages == 1:
            return configuration.virtual
        return sum(micro_batches_in_flight(pipeline, 0, count, (1.0,) * configuration.virtual))

    def _layer_traces(self, configuration: Configuration) -> _LayerTraces:
        """The traces of the layers on one data rank (of as many as context and experts need)."""
        key = replace(configuration, stages=1, virtual=1, schedule="1f1b", zero=0, group=0, offload=False)
        if key not in self._layers:
            data = max(configuration.experts, 1) * configuration.context
            cluster = replace(self.work.cluster, size=data * configuration.tensor)
            work = replace(self.work, batch=configuration.micro * max(configuration.experts, 1), cluster=cluster)
            alone = Pricer(work, _placed=self._placed)
            graph, candidate = alone.candidate(key)
            shared = self._layer_costs.setdefault(self._graph_key(key), SharedCosts(graph, self.work.cluster))
            costs = shared.of(candidate, work.cluster)
            self._layers[key] = _LayerTraces.of(graph, stage_traces(graph, candidate, work.cluster, costs)[0])
        return self._layers[key]


def _marked(graph: Graph, mark: str) -> tuple[str, ...]:
    return tuple(block.name for block in graph.blocks if block.name.endswith(mark))


@dataclass(slots=True)
class _LayerTraces:
    """Traces of the blocks that are layers, and sums over one of them (the mean, where they differ)."""

    blocks: tuple[tuple[CallTrace, float], ...]
    seconds: float
    outer_seconds: float
    saved_bytes: float
    _states: dict[object, tuple[float, float]] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, traces: dict[str, CallTrace]) -> _LayerTraces:
        inner = [block for block in graph.blocks if graph.count(block.name) > 1 or any("attention" in n.op for n in block.nodes)]
        number = sum(graph.count(block.name) for block in inner) or 1
        blocks = tuple((traces[block.name], graph.count(block.name) / number) for block in inner)
        outer = [traces[block.name] for block in graph.blocks if block not in inner]
        saved = sum(
            share
            * (trace.memory.internal_saved_bytes + max((size for _, size in trace.memory.boundary_saved_bytes), default=0.0))
            for trace, share in blocks
        )
        return _LayerTraces(blocks, sum(share * _both_ways(trace) for trace, share in blocks), sum(map(_both_ways, outer)), saved)

    def state(self, configuration: Configuration, work: Workload) -> tuple[float, float]:
        """(bytes of the state of a layer on a rank, seconds of its communication in a step)."""
        size, count = work.cluster.size, configuration.micro_batches(work.batch, work.cluster.size)
        key = configuration.zero, configuration.group, configuration.data(size), count, configuration.offload
        if key not in self._states:
            optimizer = optimizer_named(work.optimizer)
            precision = configuration.fixed(work).precision
            ranks, held, seconds = configuration.data(size) * configuration.context, 0.0, 0.0
            zero = configuration.zero if ranks > 1 else 0
            for trace, share in self.blocks:
                mesh = Mesh(tuple(replace(axis, size=ranks) if not at else axis for at, axis in enumerate(trace.costs.mesh.axes)))
                cluster = replace(work.cluster, size=mesh.size)
                costs = BlockCosts(trace.costs.block, mesh, ranks * configuration.micro, cluster, configuration.group)
                stored = list(zip(trace.costs.block.parameters, trace.plan.parameters, strict=True))
                cost = costs.state_cost(stored, zero, precision, optimizer)
                moved = costs.state_communication(cost, zero, precision, count)
                memory = cost.memory
                held += share * (memory.parameters + memory.optimizer + held_bytes(memory, count > 1))
                seconds += share * transfer_seconds(step_transfers(cluster.overlap).counted(count), moved).sent
            self._states[key] = held, seconds
        return self._states[key]


def _both_ways(trace: CallTrace) -> float:
    return sum(trace.seconds(backward=backward, exposed=exposed) for backward in (False, True) for exposed in (False, True))
