"""A few nodes on one machine: network namespaces that a bridge joins over links of a given rate, and torchrun's agents in them.

``with NetworkLab(2, "200mbit") as lab: lab.torchrun(2, "-m", "autopar", "calibrate", "-o", path)``. It needs the rights of root,
and ip and tc; `why_no_lab` says what is missing. Nodes share the machine's cores, memory and files; the network is their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from time import monotonic
from types import TracebackType

ROOT = Path(__file__).parents[2]
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Agent:
    """How torchrun ended on a node."""

    status: int
    stdout: str
    stderr: str


@lru_cache(maxsize=1)
def why_no_lab() -> str:
    """One line that says what this machine does not allow; empty where a lab can be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no lab of network namespaces: {' and '.join(missing)} missing (iproute2)"
    try:
        with NetworkLab(2, "200mbit"):
            return ""
    except LabError as error:
        return f"no lab of network namespaces: {error}"


class LabError(Exception):
    """This machine refused a step of making the lab."""


@dataclass
class NetworkLab:
    """`nodes` namespaces, each with a link of `rate` (tc's notation) both ways, and addresses ``10.77.0.1`` and so on."""

    nodes: int
    rate: str
    names: list[str] = field(default_factory=list)
    hub: str = ""

    def __enter__(self) -> NetworkLab:
        mark = f"ap{os.getpid()}-{next(_NUMBERS)}"
        self.hub, self.names = f"{mark}-hub", [f"{mark}-n{node}" for node in range(self.nodes)]
        try:
            self._make()
        except LabError:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        _said("ip", "netns", "add", self.hub)
        _in(self.hub, "ip", "link", "add", "br0", "type", "bridge")
        _in(self.hub, "ip", "link", "set", "br0", "up")
        for node, name in enumerate(self.names):
            _said("ip", "netns", "add", name)
            _in(name, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", f"port{node}", "netns", self.hub)
            _in(name, "ip", "address", "add", f"{self.address(node)}/24", "dev", "eth0")
            _in(self.hub, "ip", "link", "set", f"port{node}", "master", "br0")
            for where, device in ((name, "lo"), (name, "eth0"), (self.hub, f"port{node}")):
                _in(where, "ip", "link", "set", device, "up")
            for where, device in ((name, "eth0"), (self.hub, f"port{node}")):
                limit = ("rate", self.rate, "burst", "64kb", "latency", "100ms")
                _in(where, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def close(self) -> None:
        """Takes the namespaces away; their links go with them."""
        for name in (*self.names, self.hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def torchrun(self, ranks: int, *words: str, timeout: float = 120.0, environment: dict[str, str] | None = None) -> list[Agent]:
        """One agent on each node with `ranks` ranks, which run ``words``; how they ended. AssertionError after `timeout`."""
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
        given = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environment or {})}
        meet = ("--master-addr", self.address(0), "--master-port", "29477", "--nproc-per-node", str(ranks))
        agents = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
                + ["--nnodes", str(self.nodes), "--node-rank", str(node), *meet, *words],
                env={**os.environ, **given},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for node, name in enumerate(self.names)
        ]
        end = monotonic() + timeout
        out = []
        try:
            for agent in agents:
                said = agent.communicate(timeout=max(1.0, end - monotonic()))
                out.append(Agent(agent.returncode, *said))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"torchrun in the lab took over {timeout:g} s") from None
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGTERM)
                    agent.wait(30)
        return out


def _said(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        line = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise LabError(f"{' '.join(words[:8])}: {line}")


def _in(name: str, *words: str) -> None:
    _said("ip", "netns", "exec", name, *words)
