"""Two agents of torchrun in network namespaces of their own, joined by a slow link: what a job on two nodes meets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support.elastic_job import Killer, check_job

STEPS, MBIT = 90, 20


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two namespaces; their interfaces are called as they are, with the addresses 10.77.0.1 and 10.77.0.2."""
    names = [f"ap{os.getpid() % 100000}{side}" for side in "ab"]
    words = [f"ip netns add {name}" for name in names]
    words.append(f"ip link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
    for number, name in enumerate(names):
        inside = f"ip netns exec {name}"
        words += [
            f"{inside} ip addr add 10.77.0.{number + 1}/24 dev {name}",
            f"{inside} ip link set {name} up", f"{inside} ip link set lo up",
            f"{inside} tc qdisc add dev {name} root tbf rate {MBIT}mbit burst 32kbit latency 400ms",
        ]  # fmt: skip
    try:
        for each in words:
            try:
                subprocess.run(each.split(), check=True, capture_output=True)
            except (OSError, subprocess.CalledProcessError) as error:
                said = error.stderr.decode().strip() if isinstance(error, subprocess.CalledProcessError) else error
                pytest.skip(f"this machine does not allow network namespaces with a limited link: {each}: {said}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.mark.slow
def test_a_lost_node_returns(jobs: Any, nodes: list[str]) -> None:
    """A rank is killed while a checkpoint is written across the link; then a whole node, which comes again later."""
    job = jobs(2, 1, STEPS, host="10.77.0.1")

    def start(node: int) -> None:
        job.start(node, ("ip", "netns", "exec", nodes[node]), f"10.77.0.{node + 1}", nodes[node])

    start(0)
    start(1)
    killer = Killer(job, 2, 2)
    killer.kill("saving")
    killer.kill("in a step")
    job.wait_for(lambda: len(killer.fresh()) == 2, 120.0, "new processes")
    before = len(job.starts())
    job.wait_for(lambda: len(job.starts()) > before, 120.0, "third start")
    killer.killed |= set(job.workers())
    job.lose(1)
    killer.ranks = 1
    killer.kill("saving")
    start(1)
    job.wait_for(lambda: len(set(job.workers(1))) == 1, 120.0, "second node")
    assert job.wait(180.0) == [0, 0]
    plans = [line for line in job.text().splitlines() if ": from step " in line]
    assert any("dp=2" in line or "tp=2" in line or "pp=2" in line for line in plans[-1:]), plans
    check_job(job, STEPS)
