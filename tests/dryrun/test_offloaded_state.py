"""The dry run of plans with the optimizer's state in host memory: the peak is the predicted one, and the state is on the host."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

import pytest

from autopar.capture import capture
from autopar.capture.models import load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.device_specs import OffloadTarget
from autopar.cost_models.step.evaluate import evaluate
from autopar.dryrun.run import DryRun, dry_run
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.plan_inputs import registry, split_inputs
from autopar.solve.fixed.candidate import price_configuration
from autopar.solve.fixed.configuration import configuration_of
from autopar.solve.plan_of_result import plan_of_result
from autopar.solve.space.force import parse_force

HOST = OffloadTarget("host", 2.0**40, 20e9, 10e9)
SLOW = partial(pytest.param, marks=pytest.mark.slow)


@cache
def graph_of(name: str) -> Graph:
    loaded = load_model(name, 8, None)
    return capture(loaded.model, *split_inputs(loaded.example_inputs))


def dry(model: str, cluster: Cluster, force: str) -> tuple[DryRun, float]:
    """And what is predicted of tensors."""
    graph = graph_of(model)
    complete = parse_force(f"{force},micro_batches=1,recompute=none,zero_group=0,sequence_parallel=0")
    fixed = configuration_of(complete, Precision(offload_optimizer=complete.offload_optimizer), "adamw")
    plan = plan_of_result(graph, cluster, price_configuration(graph, cluster, fixed, registry()), (), optimizer="adamw")
    return dry_run(plan, 0), evaluate(plan.graph, plan.candidate, cluster).stage_memory[0].tensor_bytes


@pytest.mark.parametrize(
    ("model", "name", "force"),
    [("gpt2-tiny", "local:4", "tp=1,pp=1,zero=3"), ("gpt2-tiny", "local:4", "tp=1,pp=1,zero=0"),
     SLOW("gpt2-tiny", "local:4", "tp=1,pp=2,zero=3"), SLOW("gpt2", "dgx-h100:1", "tp=1,pp=1,zero=0")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_the_peak_is_the_predicted_one(model: str, name: str, force: str) -> None:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    cluster = replace(Cluster.parse(name), host=HOST, nvme=HOST)
    plain, _ = dry(model, cluster, force)
    found, predicted = dry(model, cluster, force + ",offload_optimizer=cpu")
    assert 0.97 * found.peak_bytes <= predicted <= 1.03 * found.peak_bytes, (found.peak_bytes, predicted)
    state = plain.memory["optimizer"]
    assert plain.host_bytes == 0 and 0.99 * state <= found.host_bytes <= state > 0
    assert found.peak_bytes < plain.peak_bytes
    with pytest.raises(AutoparError, match="to nvme: it is priced only; plan with offload_optimizer=cpu") as refused:
        dry(model, cluster, force + ",offload_optimizer=nvme")
    assert "\n" not in str(refused.value)
