"""One step case, in a process of its own: a fixed configuration is priced, and one of its ranks runs on the device at hand."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import replace
from math import log2
from typing import Any

from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import OffloadTarget
from autopar.cost_models.hardware.software_stacks import with_compilation
from autopar.cost_models.step.evaluate import evaluate
from autopar.dryrun.real_kernels import compare_with_plan, measure_rank
from autopar.ir.plan_file.plan_file import Plan
from autopar.machine_report.cases import StepCase
from autopar.options import PlanOptions
from autopar.plan_inputs import capture_for, registry
from autopar.precision import precision_of
from autopar.report.predicted_step import predicted_step
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import FixedConfiguration
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.result import PlanResult

STEPS = 5
MOST_TIMES = 2**10
MEMORY_SHARE = 0.6
"""Larger batches than such as are predicted to take so much of the memory are not run: predictions may be wrong."""

_STATE = ("parameters", "optimizer", "gradients", "buffers", "base", "slack")
"""Kinds of memory that do not grow with the batch."""


def plan_case(case: StepCase, cluster: Cluster) -> Plan:
    """Return the plan of a case, with the largest batch that the prices of `cluster` allow, by powers of two."""
    cluster = with_compilation(cluster, bool(case.compiler))
    host = cluster.host or OffloadTarget("host", float(cluster.device.memory_bytes), 1e10, 1e10)
    cluster = replace(cluster, host=host if case.offload else cluster.host)
    least = _priced(case, cluster, 1)
    best = _priced(case, cluster, times) if (times := _times(least, case.step_seconds)) > 1 else least
    return plan_of_result(
        replace(best.graph, batch=best.candidate.batch), cluster, best, (), optimizer="adamw", name=case.model,
        source=case.model, seq=case.seq,
    )  # fmt: skip


def _times(least: PlanResult, step_seconds: float) -> int:
    """Return by how much the batch may be larger, a power of two: seconds and activations grow with it at most."""
    evaluation, memory = least.evaluation, dict(least.evaluation.memory)
    state = sum(memory.get(kind, 0) for kind in _STATE)
    free = MEMORY_SHARE * evaluation.memory_budget_bytes - state
    most = min(step_seconds / evaluation.step_seconds, free / max(1, evaluation.peak_memory_bytes - state), MOST_TIMES)
    return 2 ** int(log2(most)) if most >= 1 else 1


def _priced(case: StepCase, cluster: Cluster, times: int) -> PlanResult:
    batch = times * case.micro_batches * (case.devices // (case.tp * case.pp))
    loaded = load_model(case.model, batch, case.seq)
    precision = precision_of(case.precision, loaded.model)
    graph = replace(capture_for(loaded.model, loaded.example_inputs, PlanOptions(precision=precision), precision), batch=batch)
    repeated = tuple(block.name for block in graph.blocks if graph.count(block.name) > 1) if case.offload else ()
    fixed = FixedConfiguration(
        tp=case.tp, sequence_parallel=case.tp > 1, pp=case.pp, zero=case.zero, micro_batches=case.micro_batches,
        recompute=case.recompute, offloaded_blocks=repeated, precision=precision,
    )  # fmt: skip
    priced = price_configuration(graph, cluster, fixed, registry())
    if not case.offload:
        return priced
    named = [tuple(each for each in plan.offload if not each[0].endswith("+")) for plan in priced.candidate.blocks]
    pairs = zip(priced.candidate.blocks, named, strict=True)  # what operations save for themselves has no name in programs
    candidate = replace(priced.candidate, blocks=tuple(replace(plan, offload=names) for plan, names in pairs))
    return replace(priced, candidate=candidate, evaluation=evaluate(graph, candidate, cluster))


def measure_case(case: StepCase, cluster: Cluster) -> dict[str, Any]:
    """Return the parts of the step (seconds) and its peak memory (bytes), each measured and predicted."""
    plan = plan_case(case, cluster)
    run = measure_rank(plan, 0, STEPS, compiler=case.compiler)
    found: dict[str, Any] = compare_with_plan(plan, run)["compute"]
    memory = next(each for each in predicted_step(plan)["memory"] if each["stage"] == run.stage)
    found["peak_bytes"] = {"measured": run.peak_bytes or None, "predicted": memory["peak_bytes"]}
    batch = plan.document.batch
    return {"device": run.device, "batch": batch.global_, "seq": batch.seq, "parts": found, "measured": run.measured}


def main(job: str) -> None:
    """Print the measurement of a case as JSON, with the warnings that were given meanwhile."""
    data = json.loads(job)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure_case(StepCase(**data["case"]), Cluster.from_dict(data["cluster"]))
    said = [str(each.message) for each in caught if "compile" in str(each.message)]
    print(json.dumps(found | {"warnings": said}))


if __name__ == "__main__":
    main(sys.argv[1])
