"""Plans that people write by hand, on the same cluster, as our own programs would run them: each a complete configuration,
forced, and priced by the evaluator with the cluster's own constants. A plan is never predicted to be slower than these. What
experts get of a recipe on their own software is `recipes`.

Within a recipe the micro-batches and the recomputation that fit and take least time are taken, as somebody would who tries
them. DDP: Li et al., arXiv 2006.15704; FSDP (ZeRO-3): Zhao et al., arXiv 2304.11277; with tensor and sequence parallelism in the
node: torchtitan, arXiv 2410.06511; Megatron's: arXiv 2104.04473, section 5 (tensor parallelism as wide as a node, then pipeline
stages until the model fits, then data), 2205.05198 (sequence parallelism, selective recomputation), optimizer state over the
data ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.step.evaluate import Evaluation, SharedCosts, evaluate
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.rules.registry import Registry, default_registry
from autopar.solve.fixed.candidate import BlockPlacements, fixed_candidate, place_blocks
from autopar.solve.fixed.configuration import TENSOR_AXIS, FixedConfiguration
from autopar.solve.result import PlanResult
from autopar.solve.space.grid import GridPoint, devices_per_node
from autopar.solve.space.meshes import divisors
from autopar.solve.space.micro_batches import micro_batch_counts, why_one_micro_batch
from autopar.solve.space.options import SearchOptions

_REPEATED = 0.05
"""A tensor axis whose ranks all repeat more than this share of the FLOPs is too wide: nobody would use it."""

_MAX_SIZES = 4
"""Sizes of micro-batches that are tried of a pipeline, from the smallest on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A kind of plan that people write by hand. `key` names it in files, `title` for people. `recompute` is tried in this order,
    `pipeline` lengthens until it fits."""

    key: str
    title: str
    zero: int
    tensor: bool = False
    pipeline: bool = False
    recompute: tuple[str, ...] = ("none", "full")


RECIPES = (
    Recipe("ddp", "DDP", 0),
    Recipe("fsdp", "FSDP", 3),
    Recipe("fsdp_tp", "FSDP + TP in the node", 3, tensor=True),
    Recipe("megatron", "Megatron's recipe", 1, tensor=True, pipeline=True, recompute=("none", "selective", "everything")),
)


def memory_word(evaluation: Evaluation | None) -> str:
    """Say in words how a configuration fits: with the memory margin; only without it; only where the allocator keeps nothing
    beyond the tensors; or not at all."""
    if evaluation is None:
        return ""
    if evaluation.fits:
        return "fits"
    if evaluation.peak_memory_bytes <= evaluation.memory_capacity_bytes:
        return "fits without margin"
    return "above the device, tensors alone fit" if evaluation.can_run else "does not fit"


@dataclass(frozen=True, slots=True)
class ExpertPrice:
    """The recipe on the software that people run it on, the best of its usual knobs (`recipes`): a comparison, and no
    bound of the search. `measured` is a published run in words, `measured_seconds` its time where batch and precision are the
    same too. `own` is the same configuration on our programs' kernels, `seed` is it as a candidate of the search, where a fixed
    configuration has all of its degrees; `stage` is the point of its pipeline, with the chunks per stage, where it has not;
    `better` says which kernels of the software are better than ours. `reason` says by how
    much and why it is faster than the plan, where it is."""

    software: str
    configuration: str = ""
    evaluation: Evaluation | None = None
    problem: str = ""
    measured: str = ""
    measured_seconds: float | None = None
    own: Evaluation | None = None
    seed: PlanResult | None = None
    stage: tuple[GridPoint, int] | None = None
    better: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it may run: experts leave no margin, and the allocator gives back what it does not need."""
        return self.evaluation is not None and self.evaluation.can_run

    @property
    def short_bytes(self) -> int:
        """The bytes that a device lacks to run it at all."""
        stages = self.evaluation.stage_memory if self.evaluation is not None else ()
        return int(max((each.least_bytes - each.capacity_bytes for each in stages), default=0)) if not self.fits else 0


@dataclass(frozen=True, slots=True)
class PricedRecipe:
    """A recipe on a cluster, as our own programs would run it: the fastest of its variants that fit, or, where none does, the
    nearest. `problem` says why there is none at all. `expert` is what people get of it on other software."""

    recipe: Recipe
    configuration: FixedConfiguration | None = None
    candidate: Candidate | None = None
    evaluation: Evaluation | None = None
    problem: str = ""
    expert: ExpertPrice | None = None

    @property
    def fits(self) -> bool:
        return self.evaluation is not None and self.evaluation.fits

    @property
    def short_bytes(self) -> int:
        """The bytes that a device lacks; 0 where it fits."""
        evaluation = self.evaluation
        return max(0, evaluation.peak_memory_bytes - evaluation.memory_budget_bytes) if evaluation is not None else 0

    @property
    def description(self) -> str:
        """The configuration in words: ``tp=8 pp=4 dp=2, ZeRO-1, 16 micro-batches, selective recomputation``."""
        if self.configuration is None or self.candidate is None:
            return ""
        configuration = self.configuration
        parts = [f"tp={configuration.tp}"] * (configuration.tp > 1) + [f"pp={configuration.pp}"] * (configuration.pp > 1)
        parts = [" ".join([*parts, f"dp={self.candidate.mesh.size_of(DATA_AXIS)}"])]
        parts += [f"ZeRO-{configuration.zero}"] * (configuration.zero > 0) + [
            "sequence parallel"
        ] * configuration.sequence_parallel
        parts += [f"{configuration.micro_batches} micro-batches"] * (configuration.micro_batches > 1)
        recompute = "full" if configuration.recompute == "everything" else configuration.recompute
        parts += [f"{recompute} recomputation"] * (recompute != "none")
        return ", ".join(parts)


def baselines(
    graph: Graph, cluster: Cluster, options: SearchOptions, recipes: Sequence[Recipe] = RECIPES
) -> tuple[PricedRecipe, ...]:
    """Every recipe on `cluster`, in the order of `recipes`. Nothing that `options` forces holds for them but the batch, the
    precision and the optimizer."""
    if options.batch not in (0, graph.batch):
        graph = replace(graph, batch=options.batch)
    pricer = _Pricer(graph, cluster, options)
    return tuple(pricer.price(recipe) for recipe in recipes)


class _Pricer:
    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions) -> None:
        self.graph, self.cluster, self.options = graph, cluster, options
        self.registry: Registry = options.registry or default_registry()
        self.whole = bool(why_one_micro_batch(graph, self.registry))
        self.placed: dict[tuple[int, bool], BlockPlacements] = {}
        self.costs = SharedCosts(graph, cluster)

    def price(self, recipe: Recipe) -> PricedRecipe:
        try:
            return self._best(recipe)
        except AutoparError as error:
            return PricedRecipe(recipe, problem=str(error))

    def _best(self, recipe: Recipe) -> PricedRecipe:
        tensor = self._width() if recipe.tensor else 1
        if recipe.tensor and tensor == 1:
            return PricedRecipe(recipe, problem="the devices of one node cannot share the model's operations")
        nearest: PricedRecipe | None = None
        for stages in divisors(self.cluster.size // tensor) if recipe.pipeline else [1]:
            variants = list(self._variants(recipe, tensor, stages))
            if not variants:
                continue
            last = self._one(recipe, variants[-1])
            if nearest is None or last.short_bytes < nearest.short_bytes:
                nearest = last
            if last.fits:
                return min((each for each in (*self._priced(recipe, variants[:-1]), last) if each.fits), key=_seconds)
        if nearest is None:
            ranks = self.cluster.size // tensor
            return PricedRecipe(recipe, problem=f"a batch of {self.graph.batch} does not divide by {ranks} data ranks")
        return nearest

    def _priced(self, recipe: Recipe, variants: Sequence[FixedConfiguration]) -> Iterator[PricedRecipe]:
        """Yield the priced variants but those that only recompute more than one that fits: they are never faster. `variants`
        recompute more and more."""
        fitting: set[int] = set()
        for each in variants:
            if each.micro_batches not in fitting:
                priced = self._one(recipe, each)
                if priced.fits:
                    fitting.add(each.micro_batches)
                yield priced

    def _variants(self, recipe: Recipe, tensor: int, stages: int) -> Iterator[FixedConfiguration]:
        """The one that takes least memory last: everything recomputed, the smallest micro-batches."""
        data = self.cluster.size // (tensor * stages)
        if self.graph.batch % data or stages > len(self.graph.calls):
            return
        counts: Sequence[int] = micro_batch_counts(self.graph.batch, data, {}, self.whole)
        for recompute in recipe.recompute:
            for count in sorted(counts)[-_MAX_SIZES if stages > 1 else 0 :]:
                yield FixedConfiguration(
                    tp=tensor, sequence_parallel=tensor > 1, pp=stages, zero=recipe.zero if data > 1 else 0, micro_batches=count,
                    recompute=recompute, precision=self.options.precision, optimizer=self.options.optimizer,
                )  # fmt: skip

    def _one(self, recipe: Recipe, configuration: FixedConfiguration) -> PricedRecipe:
        candidate = fixed_candidate(self.graph, self.cluster, configuration, self._placed(configuration), self.registry)
        evaluation = self._evaluated(self.graph, candidate)
        return PricedRecipe(recipe, configuration, candidate, evaluation)

    def _evaluated(self, graph: Graph, candidate: Candidate) -> Evaluation:
        return evaluate(graph, candidate, self.cluster, self.options.optimizer, self.costs.of(candidate))

    def _placed(self, configuration: FixedConfiguration) -> BlockPlacements:
        key = configuration.tp, configuration.sequence_parallel
        if key not in self.placed:
            self.placed[key] = place_blocks(self.graph, configuration, self.registry)
        return self.placed[key]

    def _width(self) -> int:
        """The widest tensor axis in a node that has work for all of its ranks, 1 where none has."""
        for width in reversed(divisors(min(devices_per_node(self.cluster), self.cluster.size))):
            data = self.cluster.size // width
            if width == 1 or self.cluster.size % width:
                continue
            configuration = FixedConfiguration(
                tp=width, sequence_parallel=True, precision=self.options.precision, optimizer=self.options.optimizer
            )
            graph = replace(self.graph, batch=data)
            try:
                candidate = fixed_candidate(graph, self.cluster, configuration, self._placed(configuration), self.registry)
            except AutoparError:
                continue
            if dict(self._evaluated(graph, candidate).redundant_share)[TENSOR_AXIS] <= _REPEATED:
                return width
        return 1


def _seconds(priced: PricedRecipe) -> float:
    assert priced.evaluation is not None
    return priced.evaluation.step_seconds
