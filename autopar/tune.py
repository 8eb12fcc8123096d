"""A race of plans on their devices, under torchrun: each trains some steps, in turn, in several laps, so that what disturbs the
machine for a while disturbs all of them; and what ``autopar tune`` learns of it: the shares of a cluster's figures that explain
measured steps best."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, log
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import nn

from autopar.api import parallelize
from autopar.cost_models.calibrate.fit import descend
from autopar.cost_models.hardware.cluster import Cluster, with_tuned_rates
from autopar.cost_models.hardware.cluster_file import in_human_units
from autopar.cost_models.hardware.stack_entries import TunedRates, tuned_of, with_tuned_line
from autopar.cost_models.step.evaluate import evaluate
from autopar.dryrun.run import make_optimizer
from autopar.errors import AutoparError, ClusterError
from autopar.files import read_text, write_whole
from autopar.given_plan import compiler_of, priced_as
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.plan_inputs import ExampleInputs, split_inputs
from autopar.runtime.comm.agreement import gather
from autopar.runtime.progress import advance, working
from autopar.runtime.step.out_of_memory import is_out_of_memory

_NOISE, _PRIOR = 0.03, 0.5
"""Standard deviations, in logarithms: of a measured step, and of shares before anything was run. Plans that differ in nothing but
compute say little of the network, which then stays as it was."""
_MOST = 4.0


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A plan that ran, the cluster that it was priced on, and the seconds of its step."""

    graph: Graph
    candidate: Candidate
    cluster: Cluster
    optimizer: str
    seconds: float

    def ratio(self, rates: TunedRates) -> float:
        """Return predicted over measured seconds at these shares."""
        cluster = with_tuned_rates(self.cluster, rates)
        return evaluate(self.graph, self.candidate, cluster, self.optimizer).step_seconds / self.seconds


def fit_steps(steps: Sequence[MeasuredStep]) -> TunedRates:
    """Return the shares of least squares of the logarithms of predicted over measured seconds."""

    def loss(shares: Mapping[str, float]) -> float:
        off = sum((log(each.ratio(TunedRates(**shares))) / _NOISE) ** 2 for each in steps)
        return off + sum((log(share) / _PRIOR) ** 2 for share in shares.values())

    start = asdict(TunedRates())
    return TunedRates(**descend(loss, start, dict.fromkeys(start, (1 / _MOST, _MOST))))


WARM_UP_STEPS = 2
"""Steps of a lap that do not count: the first ones make buffers and the state of the optimizer."""

LEAST_GAIN = 0.01
"""The share by which another plan has to be faster than the first one: less is the noise of the machine."""


@dataclass(frozen=True, slots=True)
class RacedPlan:
    """A plan with the seconds of its steps, each that of the slowest rank; or with the `error` that ended it."""

    plan: Plan
    step_seconds: tuple[float, ...] = ()
    error: str = ""

    @property
    def median_seconds(self) -> float:
        """The median step; infinite where it did not run."""
        return median(self.step_seconds) if self.step_seconds and not self.error else float("inf")

    @property
    def least_seconds(self) -> float:
        """The shortest step, which other load on the machine disturbed least; infinite where it did not run."""
        return min(self.step_seconds) if self.step_seconds and not self.error else float("inf")


def race(
    model: nn.Module, plans: Sequence[Plan], cluster: Cluster, example_inputs: ExampleInputs, laps: int, steps: int
) -> list[RacedPlan]:
    """Run the plans in turn, `steps` counted steps a lap; all ranks must call. The model is not changed. Returns the same on all
    ranks. AutoparError where the model returns no loss, or the first plan does not run."""
    if not plans[0].graph.has_loss:
        raise AutoparError("steps are measured from a loss to its update, and the model returns none: pass one that does")
    raced = [RacedPlan(plan) for plan in plans]
    with working(f"running {len(plans)} plans in turn", laps * len(plans)):
        for number in [*range(len(raced))] * laps:
            each = raced[number]
            advance(detail=each.plan.describe())
            if each.error:
                continue
            try:
                seconds = _lap(model, each.plan, cluster, example_inputs, steps)
            except AutoparError as error:
                if number == 0:
                    raise
                raced[number] = RacedPlan(each.plan, error=str(error))
                continue
            raced[number] = RacedPlan(each.plan, (*each.step_seconds, *seconds))
    return raced


def fastest(raced: Sequence[RacedPlan]) -> RacedPlan:
    """Return the plan with the shortest median step; the first one unless another is faster by `LEAST_GAIN`."""
    best = min(raced, key=lambda each: each.median_seconds)
    return best if best.median_seconds < raced[0].median_seconds * (1 - LEAST_GAIN) else raced[0]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The findings of a race about its cluster: shares of the cluster's figures, and predicted over measured steps, as they were
    and with these shares."""

    rates: TunedRates
    before: tuple[float, ...]
    after: tuple[float, ...]

    def __str__(self) -> str:
        before, after = (f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in (self.before, self.after))
        return f"predicted over the shortest measured steps were {before}, and are {after} with it"


def learn(raced: Sequence[RacedPlan]) -> Lesson:
    """Return what the shortest steps of the plans that ran say of their cluster: its file is to hold rates of the devices, not
    what else ran on them meanwhile."""
    steps = [
        MeasuredStep(
            each.plan.graph, each.plan.candidate, Cluster.from_dict(as_run(each.plan).document.cluster.description),
            each.plan.document.optimizer, each.least_seconds,
        )
        for each in raced
        if isfinite(each.least_seconds)
    ]  # fmt: skip
    rates = fit_steps(steps)
    before, after = (tuple(each.ratio(shares) for each in steps) for shares in (TunedRates(), rates))
    return Lesson(rates, before, after)


def cluster_file(cluster: str, plan: str) -> Path:
    """Return the file that keeps what is learnt of a cluster: its own, or for the name of one a file beside the plan."""
    return Path(cluster) if cluster.endswith((".yaml", ".yml")) else Path(plan).with_suffix(".cluster.yaml")


def keep(lesson: Lesson, named: str, cluster: Cluster, path: Path, how: str) -> None:
    """Write the shares into the cluster's file, on top of those that it has, or the whole cluster where it was `named`."""
    if Path(named) == path:
        text = read_text(path, ClusterError, "cluster file")
    else:
        content = {key: value for key, value in cluster.to_dict().items() if key != "name"}
        text = yaml.safe_dump(in_human_units(content), sort_keys=False, width=128)
    write_whole(path, with_tuned_line(text, tuned_of(text).times(lesson.rates), f"{how}: {lesson}"))


def as_run(plan: Plan) -> Plan:
    """Return the plan priced as `parallelize` runs it here: without Triton blocks are not compiled, whatever it says."""
    return priced_as(plan, bool(compiler_of(plan, None)))


class _LapProblem(AutoparError):
    """The error of a rank, on all ranks."""


def _lap(model: nn.Module, plan: Plan, cluster: Cluster, example_inputs: ExampleInputs, steps: int) -> list[float]:
    """Train a copy of the model, and return the seconds of the counted steps, of the slowest rank each. All ranks end with the
    error of one: none is left waiting in a lap that another one has given up."""
    gc.collect()  # what is left of the lap before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return _steps(model, plan, cluster, example_inputs, steps)
    except Exception as error:
        if not isinstance(error, _LapProblem) and (isinstance(error, AutoparError) or is_out_of_memory(error)):
            _begin_together(str(error).partition("\n")[0])
        raise


def _begin_together(error: str = "") -> None:
    """Wait for all ranks. _LapProblem on all of them where one comes with an error instead."""
    said = [each for each in gather(error) if each]
    if said:
        raise _LapProblem(said[0])


def _steps(model: nn.Module, plan: Plan, cluster: Cluster, example_inputs: ExampleInputs, steps: int) -> list[float]:
    parallel = parallelize(copy.deepcopy(model), cluster, example_inputs, plan=plan)
    args, batch = split_inputs(example_inputs)
    optimizer = make_optimizer(plan.document.optimizer, parallel, foreach=None)
    own = []
    for _ in range(WARM_UP_STEPS + steps):
        _begin_together()
        _wait(parallel.program.mesh.device)
        begin = time.perf_counter()
        result = parallel(*args, **batch)
        getattr(result, "loss", result).backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(parallel.program.mesh.device)
        own.append(time.perf_counter() - begin)
    _begin_together()
    return [max(seconds) for seconds in zip(*gather(own[WARM_UP_STEPS:]), strict=True)]


def _wait(device: Any) -> None:
    """Wait for what a device still computes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
