"""A recipe's price: of its knobs, the fastest that fits, by the evaluator. An estimate orders them, and a few are evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from autopar.cost_models.step.evaluate import Evaluation, evaluate, stage_traces
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.rules.registry import default_registry
from autopar.solve.fixed.block_placements import BlockPlacements, place_blocks
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.validate.graphs import RunOptions, graph_of
from autopar.validate.recipes.knobs import Knobs, LayerCost, LayerCosts, Workload, estimated_bytes, estimated_seconds, knobs_of

MOST_EVALUATED = 7
"""So many configurations of a recipe are evaluated at most; then, if none of them fits, `_LEAST` that need least memory."""
_LEAST = 2
_HOPE = 0.93
"""What a class of configurations that none was evaluated of may turn out to take, beside the others."""
_SEVERAL = 8
_MORE_ROOM = 0.93
_WORTH_A_LOOK = 1.15
"""What is estimated to need more than this share of a device's memory is not evaluated while others are left."""


@dataclass(frozen=True, slots=True)
class PricedKnobs:
    """One configuration with its cost."""

    knobs: Knobs
    candidate: Candidate
    evaluation: Evaluation

    @property
    def fits(self) -> bool:
        """Whether it may run. Experts try, and leave no margin: a configuration that would reserve more than there is runs all
        the same while its tensors fit (`hardware.allocator`)."""
        return self.evaluation.can_run

    @property
    def least_bytes(self) -> float:
        """What the fullest stage cannot do without."""
        return max(stage.least_bytes for stage in self.evaluation.stage_memory)


@dataclass(slots=True)
class RecipePricer:
    """Prices the recipes of one workload; recipes share graphs, placements and the cost of a layer. `evaluated` counts."""

    work: Workload
    evaluated: int = 0
    _placed: dict[object, BlockPlacements] = field(default_factory=dict)
    _costs: LayerCosts | None = None

    def best(self, recipe: str) -> PricedKnobs | None:
        """The fastest configuration that fits, or the one that lacks least memory; None where batch and cluster allow none."""
        work, costs = self.work, self.costs
        every = [
            _Estimate(estimated_seconds(k, work, costs), estimated_bytes(k, work, costs.one), k) for k in knobs_of(recipe, work)
        ]
        if not every:
            return None
        corrections = _Corrections(work.cluster.device.memory_bytes)
        left, found = list(every), list[PricedKnobs]()
        for number in range(2 * MOST_EVALUATED):
            reached = min((each.evaluation.step_seconds for each in found if each.fits), default=inf)
            left = [each for each in left if corrections.may_fit(each)]
            chosen = min(left, key=corrections.seconds, default=None)
            if chosen is None or corrections.seconds(chosen) >= reached or (number >= MOST_EVALUATED and reached < inf):
                break
            left.remove(chosen)
            priced = self.price(chosen.knobs, exactly=False)
            if priced is not None:
                found.append(priced)
                corrections.learn(chosen, priced)
        if not any(each.fits for each in found):
            least = sorted(every, key=lambda each: each.peak_bytes)[:_LEAST]
            found += filter(None, (self.price(each.knobs, exactly=False) for each in least))
        return self._exactly(found)

    def _exactly(self, found: Sequence[PricedKnobs]) -> PricedKnobs | None:
        """The best of `found` with placements of its own."""
        ordered = sorted(found, key=lambda each: (not each.fits, each.evaluation.step_seconds if each.fits else each.least_bytes))
        nearest: PricedKnobs | None = None
        for each in ordered:
            degrees = each.knobs.tensor > 1, each.knobs.context > 1, each.knobs.experts > 1, each.knobs.tensor
            exact = each if degrees in self._placed else self.price(each.knobs) or each
            if exact.fits:
                return exact
            nearest = nearest or exact
        return nearest

    def price(self, knobs: Knobs, exactly: bool = True) -> PricedKnobs | None:
        """One configuration; None where it cannot be placed."""
        self.evaluated += 1
        try:
            graph, candidate = self.candidate(knobs, exactly)
            found = evaluate(graph, candidate, self.work.cluster, self.work.optimizer)
        except AutoparError:
            return None
        return PricedKnobs(knobs, candidate, found)

    def candidate(self, knobs: Knobs, exactly: bool = True) -> tuple[Graph, Candidate]:
        """The graph of a configuration at its batch, and its candidate. Placements hardly depend on the degree of an axis that
        there is: unless `exactly`, those of another degree will do."""
        graph, fixed = self.graph(knobs), self.configuration(knobs)
        alike = knobs.tensor > 1, knobs.context > 1, knobs.experts > 1
        key = (*alike, knobs.tensor) if exactly or alike not in self._placed else alike
        if key not in self._placed:
            placed = place_blocks(graph, fixed, default_registry(published=True))
            self._placed[key] = placed
            self._placed.setdefault(alike, placed)
        return graph, fixed_candidate(graph, self.work.cluster, fixed, self._placed[key])

    def configuration(self, knobs: Knobs) -> FixedConfiguration:
        """Without context and expert parallelism, which are in the graph."""
        work = self.work
        return FixedConfiguration(
            tp=knobs.tensor,
            sequence_parallel=knobs.tensor > 1 and work.sequence_parallel,
            sliced_experts=not work.whole_experts,
            pp=knobs.stages,
            virtual=knobs.virtual,
            zero=knobs.zero,
            zero_group=knobs.group,
            micro_batches=knobs.micro_batches(work.batch, work.cluster.size),
            recompute=knobs.recompute,
            precision=work.precision,
            optimizer=work.optimizer,
        )

    def graph(self, knobs: Knobs) -> Graph:
        work = self.work
        options = RunOptions(work.float8, False, knobs.context, knobs.experts, work.once, packed=work.packed)
        graph = graph_of(work.decoder, work.layers, work.precision.compute, options)
        return replace(graph, batch=work.batch * knobs.context)

    @property
    def costs(self) -> LayerCosts:
        """Of one sequence, and of several, on one device."""
        if self._costs is None:
            self._costs = LayerCosts(self._layer(1), self._layer(_SEVERAL))
        return self._costs

    def _layer(self, sequences: int) -> LayerCost:
        cluster = replace(self.work.cluster, size=1)
        alone = RecipePricer(replace(self.work, batch=sequences, cluster=cluster), _placed=self._placed)
        graph, candidate = alone.candidate(Knobs(micro=sequences))
        return LayerCost.of(graph, stage_traces(graph, candidate, cluster)[0], sequences)


@dataclass(frozen=True, slots=True)
class _Estimate:
    seconds: float
    peak_bytes: float
    knobs: Knobs

    @property
    def kind(self) -> object:
        """Estimates of one kind err alike."""
        knobs = self.knobs
        parts = knobs.context > 1, knobs.stages > 1, knobs.virtual > 1, knobs.experts > 1
        return knobs.tensor, parts, knobs.recompute, knobs.zero == 3


@dataclass(slots=True)
class _Corrections:
    """What the evaluations so far say of the estimates."""

    capacity_bytes: float
    _seconds: dict[object, float] = field(default_factory=dict)
    _bytes: dict[object, float] = field(default_factory=dict)
    _too_large: int = 0

    def learn(self, estimate: _Estimate, priced: PricedKnobs) -> None:
        kind = estimate.kind
        self._seconds[kind] = min(priced.evaluation.step_seconds / estimate.seconds, self._seconds.get(kind, inf))
        self._too_large += not priced.fits
        self._bytes[kind] = min(priced.least_bytes / estimate.peak_bytes, self._bytes.get(kind, inf))

    def seconds(self, estimate: _Estimate) -> float:
        """Of a kind that nothing was evaluated of yet, hopefully."""
        return estimate.seconds * self._seconds.get(estimate.kind, _HOPE * min(self._seconds.values(), default=1.0))

    def may_fit(self, estimate: _Estimate) -> bool:
        """Of a kind that nothing was evaluated of yet, as the others err; the more were too large, the more room is asked for."""
        known = self._bytes.get(estimate.kind)
        ratio = known if known is not None else max(1.0, min(self._bytes.values(), default=1.0))
        allowed = 1.0 if known is not None else _WORTH_A_LOOK * _MORE_ROOM**self._too_large
        return estimate.peak_bytes * ratio <= allowed * self.capacity_bytes
