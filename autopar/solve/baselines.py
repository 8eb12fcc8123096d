"""What people write by hand, on the same cluster: each a complete configuration, forced, and priced by the evaluator.

Within a recipe the micro-batches and the recomputation that fit and take least time are taken, as somebody would who tries
them. DDP: Li et al., arXiv 2006.15704; FSDP (ZeRO-3): Zhao et al., arXiv 2304.11277; with tensor and sequence parallelism in the
node: torchtitan, arXiv 2410.06511; Megatron's: arXiv 2104.04473, section 5 (tensor parallelism as wide as a node, then pipeline
stages until the model fits, then data), 2205.05198 (sequence parallelism, selective recomputation), optimizer state over the
data ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.evaluate import Evaluation, evaluate
from autopar.cost_models.hardware import Cluster
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate
from autopar.rules.registry import Registry, default_registry
from autopar.solve.forced import TENSOR_AXIS, Forced, Placed, forced, place
from autopar.solve.grid import inner_devices, micro_batch_counts
from autopar.solve.meshes import divisors
from autopar.solve.options import SearchOptions
from autopar.solve.parts import why_one_micro_batch

_REPEATED = 0.05
"""A tensor axis whose ranks all repeat more than this share of the FLOPs is too wide: nobody would use it."""

_SMALLEST = 4
"""Of a pipeline, so many sizes of micro-batches are tried, from the smallest on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`key` names it in files, `title` for people. `recompute` is tried in this order, `pipeline` lengthens until it fits."""

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


@dataclass(frozen=True, slots=True)
class Priced:
    """A recipe on a cluster: the fastest of its variants that fit, or, where none does, the smallest. `problem` says why there is
    none at all."""

    recipe: Recipe
    wanted: Forced | None = None
    candidate: Candidate | None = None
    evaluation: Evaluation | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.evaluation is not None and self.evaluation.fits

    @property
    def short_bytes(self) -> int:
        """What a device lacks; 0 where it fits."""
        found = self.evaluation
        return max(0, found.peak_memory_bytes - found.memory_capacity_bytes) if found is not None else 0

    @property
    def words(self) -> str:
        """``tp=8 pp=4 dp=2, ZeRO-1, 16 micro-batches, selective recomputation``."""
        if self.wanted is None or self.candidate is None:
            return ""
        wanted = self.wanted
        parts = [f"tp={wanted.tp}"] * (wanted.tp > 1) + [f"pp={wanted.pp}"] * (wanted.pp > 1)
        parts = [" ".join([*parts, f"dp={self.candidate.mesh.size_of(DATA_AXIS)}"])]
        parts += [f"ZeRO-{wanted.zero}"] * (wanted.zero > 0) + ["sequence parallel"] * wanted.sequence_parallel
        parts += [f"{wanted.micro_batches} micro-batches"] * (wanted.micro_batches > 1)
        again = "full" if wanted.recompute == "everything" else wanted.recompute
        parts += [f"{again} recomputation"] * (again != "none")
        return ", ".join(parts)


def baselines(graph: Graph, cluster: Cluster, options: SearchOptions, recipes: Sequence[Recipe] = RECIPES) -> tuple[Priced, ...]:
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
        self.placed: dict[tuple[int, bool], Placed] = {}

    def price(self, recipe: Recipe) -> Priced:
        try:
            return self._best(recipe)
        except AutoparError as error:
            return Priced(recipe, problem=str(error))

    def _best(self, recipe: Recipe) -> Priced:
        tensor = self._width() if recipe.tensor else 1
        if recipe.tensor and tensor == 1:
            return Priced(recipe, problem="the devices of one node cannot share the model's operations")
        smallest: Priced | None = None
        for stages in divisors(self.cluster.size // tensor) if recipe.pipeline else [1]:
            variants = list(self._variants(recipe, tensor, stages))
            if not variants:
                continue
            last = self._one(recipe, variants[-1])
            if smallest is None or last.short_bytes < smallest.short_bytes:
                smallest = last
            if last.fits:
                priced = (*(self._one(recipe, one) for one in variants[:-1]), last)
                return min((each for each in priced if each.fits), key=_seconds)
        if smallest is None:
            ranks = self.cluster.size // tensor
            return Priced(recipe, problem=f"a batch of {self.graph.batch} does not divide by {ranks} data ranks")
        return smallest

    def _variants(self, recipe: Recipe, tensor: int, stages: int) -> Iterator[Forced]:
        """The one that takes least memory last: everything recomputed, the smallest micro-batches."""
        data = self.cluster.size // (tensor * stages)
        if self.graph.batch % data or stages > len(self.graph.calls):
            return
        counts: Sequence[int] = micro_batch_counts(self.graph.batch, data, {}, self.whole)
        for recompute in recipe.recompute:
            for count in sorted(counts)[-_SMALLEST if stages > 1 else 0 :]:
                yield Forced(
                    tp=tensor, sequence_parallel=tensor > 1, pp=stages, zero=recipe.zero if data > 1 else 0, micro_batches=count,
                    recompute=recompute, precision=self.options.precision, optimizer=self.options.optimizer,
                )  # fmt: skip

    def _one(self, recipe: Recipe, wanted: Forced) -> Priced:
        candidate = forced(self.graph, self.cluster, wanted, self._placed(wanted), self.registry)
        evaluation = evaluate(self.graph, candidate, self.cluster, self.options.optimizer)
        return Priced(recipe, wanted, candidate, evaluation)

    def _placed(self, wanted: Forced) -> Placed:
        key = wanted.tp, wanted.sequence_parallel
        if key not in self.placed:
            self.placed[key] = place(self.graph, wanted, self.registry)
        return self.placed[key]

    def _width(self) -> int:
        """The widest tensor axis in a node that has work for all of its ranks, 1 where none has."""
        for width in reversed(divisors(min(inner_devices(self.cluster), self.cluster.size))):
            data = self.cluster.size // width
            if width == 1 or self.cluster.size % width:
                continue
            wanted = Forced(tp=width, sequence_parallel=True, precision=self.options.precision, optimizer=self.options.optimizer)
            graph = replace(self.graph, batch=data)
            try:
                candidate = forced(graph, self.cluster, wanted, self._placed(wanted), self.registry)
            except AutoparError:
                continue
            if dict(evaluate(graph, candidate, self.cluster, self.options.optimizer).redundant_share)[TENSOR_AXIS] <= _REPEATED:
                return width
        return 1


def _seconds(priced: Priced) -> float:
    assert priced.evaluation is not None
    return priced.evaluation.step_seconds
