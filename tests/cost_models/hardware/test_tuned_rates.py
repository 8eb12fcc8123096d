"""Shares of a cluster's figures: what they do to a step, how a file keeps them, and that they are found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.harness.end_to_end import prepare

from autopar.cost_models.hardware.cluster import Cluster, with_tuned_rates
from autopar.cost_models.hardware.stack_entries import TunedRates, tuned_of, with_tuned_line
from autopar.cost_models.step.evaluate import evaluate
from autopar.errors import ClusterError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate, Precision
from autopar.solve.search import search
from autopar.solve.space.options import SearchOptions
from autopar.tune import MeasuredStep, fit_steps


def graph() -> Graph:
    return prepare("gpt2").graph


def planned(cluster: Cluster, **force: int) -> Candidate:
    options = SearchOptions(batch=graph().batch, precision=Precision("float32", "float32"), force=dict(force))
    return search(graph(), cluster, options).candidate


def seconds(candidate: Candidate, cluster: Cluster, rates: TunedRates) -> float:
    return evaluate(graph(), candidate, with_tuned_rates(cluster, rates)).step_seconds


@pytest.mark.parametrize("name", ["dgx-h100:1/1", "local:1"])
def test_all_of_a_single_device_takes_as_much_longer(name: str) -> None:
    cluster = Cluster.parse(name.partition("/")[0], processes=0)
    one = cluster if cluster.size == 1 else Cluster.parse("dgx-h100", processes=1)
    candidate = planned(one)
    assert seconds(candidate, one, TunedRates(0.5)) == pytest.approx(2 * seconds(candidate, one, TunedRates()), rel=1e-6)


def test_the_network_is_what_else_a_step_waits_for() -> None:
    cluster = Cluster.parse("local:4")
    candidate = planned(cluster, tp=4)
    whole, slow = (seconds(candidate, cluster, TunedRates(network=share)) for share in (1.0, 0.05))
    assert slow > 2 * whole
    assert seconds(candidate, cluster, TunedRates(1.3, 1.3)) < whole


def test_a_fit_recovers_the_shares() -> None:
    """From the steps of three plans; plans that send nothing say nothing of the network."""
    local, truth = Cluster.parse("local:4"), TunedRates(0.7, 0.45)
    links = tuple(replace(link, latency_seconds=1e-6, bandwidth_bytes_per_second=5e7) for link in local.links)
    cluster = replace(local, links=links)  # what it sends is seen in its steps
    steps = []
    for force in ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}):
        candidate = planned(cluster, **force)
        steps.append(MeasuredStep(graph(), candidate, cluster, "adamw", seconds(candidate, cluster, truth)))
    found = fit_steps(steps)
    assert found.device == pytest.approx(truth.device, rel=0.1) and found.network == pytest.approx(truth.network, rel=0.1)
    one = Cluster.parse("local:1")
    alone = planned(one)
    quiet = fit_steps([MeasuredStep(graph(), alone, one, "adamw", seconds(alone, one, TunedRates(1.25)))])
    assert quiet.device == pytest.approx(1.25, rel=0.02) and quiet.network == 1.0


FILES = {
    "comments": "# ours\nlike: dgx-h100  # at the university\nsize: 8\n",
    "no last line end": "like: dgx-h100\nsize: 8",
    "a line before": "like: dgx-h100\ntuned: {device: 0.5}  # old\nsize: 8\n",
    "a block before": "tuned:\n  device: 0.5\n  network: 0.5\nlike: dgx-h100\nsize: 8\n",
    "in braces": "{like: dgx-h100, size: 8}\n",
    "an end mark": "like: dgx-h100\nsize: 8\n...\n",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_keeps_all_else(text: str, tmp_path: Path) -> None:
    out = with_tuned_line(with_tuned_line(text, TunedRates(0.8, 0.9), "first"), TunedRates(0.6, 0.7), "second")
    assert tuned_of(out) == TunedRates(0.6, 0.7) and out.count("tuned:") == 1 and "first" not in out and "old" not in out
    assert {key: value for key, value in yaml.safe_load(out).items() if key != "tuned"} == {"like": "dgx-h100", "size": 8}
    assert ("at the university" in out) == ("at the university" in text)
    path = tmp_path / "cluster.yaml"
    path.write_text(out)
    plain = tmp_path / "plain.yaml"
    plain.write_text("like: dgx-h100\nsize: 8\n")
    found, base = Cluster.parse(str(path)), Cluster.parse(str(plain))
    assert found.device == with_tuned_rates(base, TunedRates(0.6, 0.7)).device
    assert [each.bandwidth_bytes_per_second for each in found.links] == pytest.approx(
        [0.7 * each.bandwidth_bytes_per_second for each in base.links]
    )
    assert Cluster.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("entry", ["{device: 0}", "{device: fast}", "{devices: 1}", "0.5", "{network: 1000}"])
def test_what_is_no_share_is_refused(entry: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"like: dgx-h100\ntuned: {entry}\n")
    with pytest.raises(ClusterError, match="cluster.yaml: tuned"):
        Cluster.parse(str(path))


def test_a_file_without_it_is_as_it_was() -> None:
    cluster = Cluster.parse("dgx-h100:2")
    assert with_tuned_rates(cluster, TunedRates()) == cluster
