"""The search: every mesh solved, priced again, compared with plain DDP and FSDP; the best that fits, with a certificate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from autopar.cost_models.evaluate import Evaluation
from autopar.cost_models.hardware import Cluster
from autopar.errors import Infeasible, UnsupportedOp
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS, Mesh
from autopar.ir.plan import Candidate
from autopar.rules.expand import missing_rules
from autopar.rules.registry import default_registry
from autopar.solve.candidates import Attempt, MeshResult
from autopar.solve.ilp import Status
from autopar.solve.infeasible import explanation
from autopar.solve.meshes import mesh_of, meshes
from autopar.solve.options import SearchOptions
from autopar.solve.problem import build

__all__ = ["SearchOptions", "SearchResult", "search"]

Progress = Callable[[str], None]

_WORTH = 1 - 1e-4
"""A mesh whose bound is above this share of the best plan is not looked at further."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The plan that was chosen. `lower_bound_seconds` is below every plan on every mesh of the grid, `gap` is relative to the
    step. `warnings` would be bugs: an evaluator and an ILP that disagree."""

    candidate: Candidate
    evaluation: Evaluation
    baselines: Mapping[str, Evaluation | None]
    status: Status
    lower_bound_seconds: float
    gap: float
    meshes: tuple[MeshResult, ...]
    seconds: float
    warnings: tuple[str, ...] = ()


def search(graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress | None = None) -> SearchResult:
    """The best plan for `graph` on `cluster`. Raises BatchError, ClusterError, UnsupportedOp (strict) and Infeasible.

    First every mesh without the memory constraint: what fits is optimal there, the others have a bound. Then those whose bound
    is better than the best plan, under the constraint, the most promising first.
    """
    return _Search(graph, cluster, options, progress or (lambda line: None)).run()


class _Search:
    def __init__(self, graph: Graph, cluster: Cluster, options: SearchOptions, progress: Progress) -> None:
        if options.batch not in (0, graph.batch):
            graph = replace(graph, batch=options.batch)
        self.graph, self.cluster, self.options, self.progress = graph, cluster, options, progress
        self.registry = options.registry or default_registry()
        self.began = monotonic()
        self.best: MeshResult | None = None
        self.attempts: list[Attempt] = []
        self.tight = False

    def run(self) -> SearchResult:
        self._check_rules()
        grid = meshes(self.cluster.size, self.graph.batch, self.options.force)
        baselines = {"ddp": self._baseline(0), "fsdp": self._baseline(3)}
        if not self._forced():
            for each in baselines.values():
                self._offer(each)
        for mesh in grid:
            self._first(mesh)
        self._limited()
        self.tight = False
        for variant in [each.recomputed() for each in self.attempts if each.result.pressed]:
            if variant is not None:
                self._solve(variant)
        self._limited()
        results = [attempt.result for attempt in self.attempts]
        if self.best is None:
            if any(result.status is Status.TIMEOUT for result in results):
                raise Infeasible(
                    f"no plan for {self.graph.name} within {self.options.time_limit_seconds:g} s: raise the time limit"
                )
            raise Infeasible(explanation(self.graph, self.cluster, self.options, self.registry, self.attempts))
        return self._result(self.best, results, baselines)

    def _forced(self) -> bool:
        return bool(self.options.force or self.options.pins)

    def _check_rules(self) -> None:
        if not self.options.strict:
            return
        for block in self.graph.blocks:
            for node in missing_rules(block, self.registry):
                raise UnsupportedOp(
                    f"{node.op} at {node.source or node.name} has no sharding rule: "
                    f"give one with autopar.register_rule({node.op.replace('.', '::', 1)!r}, ...), or plan without strict"
                )

    def _left(self) -> float:
        return self.options.time_limit_seconds - (monotonic() - self.began)

    def _attempt(self, mesh: Mesh, zeros: tuple[int, ...], pins: Mapping[str, str] | None = None) -> Attempt:
        options = self.options
        began = monotonic()
        problem = build(
            self.graph, mesh, self.cluster, options.precision, options.optimizer, self.registry, zeros,
            options.pins if pins is None else pins,
        )  # fmt: skip
        axes = tuple(i for i, axis in enumerate(mesh.axes) if axis.name != DATA_AXIS and axis.name in options.force)
        result = MeshResult(mesh, seconds=monotonic() - began)
        return Attempt(self.graph, problem, axes, options.relative_gap, result)

    def _baseline(self, zero: int) -> MeshResult | None:
        """Plain data parallelism over all devices; None where the batch does not divide by them."""
        if self.graph.batch % self.cluster.size:
            return None
        attempt = self._attempt(mesh_of(self.cluster.size), (zero,), {})
        attempt.unlimited(self._left())
        return attempt.result

    def _offer(self, result: MeshResult | None) -> None:
        if result is None or not result.solved or result.evaluation is None:
            return
        if (
            self.best is None
            or self.best.evaluation is None
            or result.evaluation.step_seconds < self.best.evaluation.step_seconds
        ):
            self.best = result

    def _hopeless(self, bound_seconds: float) -> bool:
        best = self.best.evaluation.step_seconds if self.best is not None and self.best.evaluation is not None else float("inf")
        return bound_seconds > best * _WORTH

    def _first(self, mesh: Mesh) -> None:
        """One mesh without the memory constraint, unless a look at its operations alone shows that it is slower."""
        if self._left() > 0:
            self._solve(self._attempt(mesh, self.options.zeros))

    def _limited(self) -> None:
        """What was not solved without the memory constraint, the most promising first."""
        for attempt in sorted(self.attempts, key=lambda each: each.result.bound_seconds):
            if not attempt.result.solved:
                self._second(attempt)

    def _solve(self, attempt: Attempt) -> None:
        """Without the memory constraint where that may fit; a mesh for which no time is left keeps a bound."""
        result = attempt.result
        self.attempts.append(attempt)
        result.bound_seconds = cheap = max(attempt.cheap_bound(), result.bound_seconds)
        if self._left() <= 0:
            return
        if not self._forced() and (self._hopeless(cheap) or attempt.repeats_everything()):
            result.status = Status.PRUNED
        elif not self.tight or self._may_fit(attempt):
            attempt.unlimited(self._left())
            self._offer(result)
            if not result.solved and result.evaluation is not None and not self.tight:
                self.tight = True
                self._may_fit(attempt)
        self._report(result)

    def _may_fit(self, attempt: Attempt) -> bool:
        """Whether the linear relaxation finds a plan that fits."""
        result = attempt.result
        result.excess_bytes = attempt.missing_bytes(self._left())
        if result.excess_bytes > 0:
            result.status = Status.INFEASIBLE
        return result.status is not Status.INFEASIBLE

    def _second(self, attempt: Attempt) -> None:
        """The same under the memory constraint, unless it cannot win."""
        result = attempt.result
        if result.status in (Status.PRUNED, Status.INFEASIBLE) or self._left() <= 0:
            return
        if self._hopeless(result.bound_seconds):
            result.status = Status.PRUNED
            return
        attempt.limited(self._left())
        self._offer(result)
        self._report(result)

    def _report(self, result: MeshResult) -> None:
        evaluation = result.evaluation
        size = f"{evaluation.step_seconds:.4g} s, {evaluation.peak_memory_bytes / 2**30:.1f} GiB" if evaluation else ""
        if result.solved:
            text = f"{result.status:10} {size}"
        elif result.excess_bytes:
            text = f"{result.status:10} short of {result.excess_bytes / 2**30:.1f} GiB per device"
        elif size:
            text = f"too large  {size}: to be solved under the memory limit"
        else:
            text = str(result.status)
        self.progress(f"{result!s:36} {text} ({result.seconds:.1f} s)")

    def _result(self, best: MeshResult, results: list[MeshResult], baselines: Mapping[str, MeshResult | None]) -> SearchResult:
        assert best.candidate is not None and best.evaluation is not None
        step = best.evaluation.step_seconds
        possible = [r.bound_seconds for r in results if r.status is not Status.INFEASIBLE]
        tried = sum(not result.recompute for result in results)
        complete = tried == len(meshes(self.cluster.size, self.graph.batch, self.options.force))
        lower = min([*possible, step]) if complete else 0.0
        proven = complete and all(r.status is not Status.TIMEOUT for r in results)
        status = Status.OPTIMAL if proven and best.status is Status.OPTIMAL else Status.FEASIBLE
        warnings = [warning for result in results for warning in result.warnings]
        return SearchResult(
            best.candidate,
            best.evaluation,
            {name: result.evaluation if result is not None else None for name, result in baselines.items()},
            status,
            lower,
            max(0.0, 1 - lower / step) if step else 0.0,
            tuple(results),
            monotonic() - self.began,
            tuple(warnings),
        )
