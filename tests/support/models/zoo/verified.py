"""What `autopar verify` says of a model of the zoos, on the pool of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.planning import make_plan
from autopar.verification.proof import Job, prove, run_reference, subject
from autopar.verification.rank import make_runs
from support.harness.rank_pool import RankPool

FORCES = ("dp=2,tp=2", "", "pp=2")
REMEDY = re.compile(
    r"use torch.where|autopar.opaque|register_rule|plan without one|take fewer stages|force another degree|register_buffer|"
    r"call it like|keep it as pairs|pass device|mend the model|leave it open"
)
PLACE = re.compile(
    r"\.py:\d+|at [\w.]+ of \w+|module [\w.]+|\b\w+ has \d+ blocks|\w+ was captured at a batch of \d+|[\w.]+ is torch\.complex"
)


def verdict(model: nn.Module, batch: Mapping[str, Tensor], force: str, ranks: RankPool) -> str:
    """``equal`` or ``refused: `` and the line, which says a place and a remedy. AssertionError where the two sides differ."""

    def launch(job: Job, devices: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ranks.run(make_runs, job, world=devices, timeout=200)[0]
        return found

    cluster = "local:4"
    try:
        whole = subject(model, dict(batch), "float64", "float64")
        run_reference(whole)
        plan = make_plan(model, cluster, dict(batch), precision="float64", force=force, graph=whole.graph)
    except AutoparError as problem:
        line = str(problem)
        assert "\n" not in line and PLACE.search(line) and REMEDY.search(line), line
        return f"refused: {line}"
    proof = prove(whole, plan, Cluster.parse(cluster), lambda line: None, launch)
    wrong = [each for mode in proof.modes for each in mode.differences if not each.equal]
    assert proof.equal, ([mode.departs for mode in proof.modes], wrong[:3])
    assert all(each.allowed <= 1e-9 for mode in proof.modes for each in mode.differences if each.what == "gradients")
    return "equal"
