"""A recipe's price: of its knobs, the fastest that fits, by the evaluator. An estimate orders them, and a few are evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from autopar.cost_models.step.evaluate import Evaluation, evaluate, stage_traces
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.rules.table.priced_only import priced_registry
from autopar.solve.fixed.block_placements import BlockPlacements, place_blocks
from autopar.solve.fixed.candidate import fixed_candidate
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.validate.graphs import RunOptions, graph_of
from autopar.validate.recipes.knobs import Knobs, LayerCost, Workload, estimated_bytes, estimated_seconds, knobs_of

MOST_EVALUATED = 7
"""So many configurations of a recipe are evaluated at most; then, if none of them fits, `_LEAST` that need least memory."""
_LEAST = 2
_HOPE = 0.93
"""What a class of configurations that none was evaluated of may turn out to take, beside the others."""
_WORTH_A_LOOK = 1.15
"""What is estimated to need more than this share of a device's memory is not evaluated while others are left."""


@dataclass(frozen=True, slots=True)
class PricedKnobs:
    """One configuration with its cost. `fits` is the evaluator's."""

    knobs: Knobs
    candidate: Candidate
    evaluation: Evaluation

    @property
    def fits(self) -> bool:
        return self.evaluation.fits


@dataclass(slots=True)
class RecipePricer:
    """Prices the recipes of one workload; recipes share graphs, placements and the cost of a layer. `evaluated` counts."""

    work: Workload
    evaluated: int = 0
    _placed: dict[object, BlockPlacements] = field(default_factory=dict)
    _layer: LayerCost | None = None

    def best(self, recipe: str) -> PricedKnobs | None:
        """The fastest configuration that fits, or the one that lacks least memory; None where batch and cluster allow none."""
        work = self.work
        every = sorted(
            ((estimated_seconds(k, work, self.layer), estimated_bytes(k, work, self.layer), k) for k in knobs_of(recipe, work)),
            key=lambda each: each[:2],
        )
        likely = [(seconds, k) for seconds, size, k in every if size <= _WORTH_A_LOOK * work.cluster.device.memory_bytes]
        found: list[PricedKnobs] = []
        ratios: dict[object, float] = {}
        for _ in range(MOST_EVALUATED):
            left = [(self._expected(seconds, k, ratios), k) for seconds, k in likely if not _settled(k, found)]
            best = min((each.evaluation.step_seconds for each in found if each.fits), default=inf)
            seconds, knobs = min(left, key=lambda each: each[0], default=(inf, Knobs()))
            if seconds >= best:
                break
            priced = self.price(knobs)
            likely = [each for each in likely if each[1] != knobs]
            if priced is not None:
                found.append(priced)
                ratio = priced.evaluation.step_seconds / estimated_seconds(knobs, work, self.layer)
                ratios[_class_of(knobs)] = min(ratio, ratios.get(_class_of(knobs), inf))
        if not any(each.fits for each in found):
            least = sorted(every, key=lambda each: each[1])[:_LEAST]
            found += filter(None, (self.price(knobs) for _, _, knobs in least))
        fitting = [each for each in found if each.fits]
        if fitting:
            return min(fitting, key=lambda each: each.evaluation.step_seconds)
        return min(found, key=lambda each: each.evaluation.peak_memory_bytes, default=None)

    def _expected(self, seconds: float, knobs: Knobs, ratios: Mapping[object, float]) -> float:
        """An estimate as the evaluations so far correct it; of a class that none is of yet, hopefully."""
        return seconds * ratios.get(_class_of(knobs), _HOPE * min(ratios.values(), default=1.0))

    def price(self, knobs: Knobs) -> PricedKnobs | None:
        """One configuration; None where it cannot be placed."""
        self.evaluated += 1
        try:
            graph, candidate = self.candidate(knobs)
            found = evaluate(graph, candidate, self.work.cluster, self.work.optimizer)
        except AutoparError:
            return None
        return PricedKnobs(knobs, candidate, found)

    def candidate(self, knobs: Knobs) -> tuple[Graph, Candidate]:
        """The graph of a configuration at its batch, and its candidate."""
        work = self.work
        graph = self.graph(knobs)
        fixed = FixedConfiguration(
            tp=knobs.tensor,
            sequence_parallel=knobs.tensor > 1,
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
        key = knobs.tensor, knobs.context > 1, knobs.experts > 1
        if key not in self._placed:
            self._placed[key] = place_blocks(graph, fixed, priced_registry())
        return graph, fixed_candidate(graph, work.cluster, fixed, self._placed[key])

    def graph(self, knobs: Knobs) -> Graph:
        work = self.work
        options = RunOptions(work.float8, False, knobs.context, knobs.experts, work.once)
        graph = graph_of(work.decoder, work.layers, work.precision.compute, options)
        return replace(graph, batch=work.batch * knobs.context)

    @property
    def layer(self) -> LayerCost:
        """Of one sequence on one device."""
        if self._layer is None:
            one = replace(self.work, batch=1, cluster=replace(self.work.cluster, size=1))
            graph, candidate = RecipePricer(one).candidate(Knobs())
            self._layer = LayerCost.of(graph, stage_traces(graph, candidate, one.cluster)[0])
        return self._layer


def _class_of(knobs: Knobs) -> object:
    """Estimates of one class err alike."""
    return knobs.tensor, knobs.context > 1, knobs.stages > 1, knobs.experts > 1, knobs.recompute, knobs.zero == 3


def _settled(knobs: Knobs, found: list[PricedKnobs]) -> bool:
    """Whether evaluations say already that it is too large: the same with smaller micro-batches was."""
    return any(
        not each.fits and each.knobs.micro <= knobs.micro and replace(each.knobs, micro=knobs.micro) == knobs for each in found
    )
