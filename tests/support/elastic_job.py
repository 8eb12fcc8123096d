"""``torchrun`` of `examples/elastic.py`, whose processes are killed and whose nodes (agents of this machine) come and go."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

import autopar
from support.harness.fork_server import Fork, ForkServer
from support.harness.training_loop import train

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "elastic.py"
RENDEZVOUS = "join_timeout=120,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,is_host={}"
_LINE = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
_START = re.compile(r": from step (\d+)$", re.MULTILINE)


class ElasticJob:
    """A job of up to `nodes` agents with `ranks` processes each."""

    def __init__(self, folder: Path, nodes: int, ranks: int, words: Sequence[str], host: str = "localhost") -> None:
        self.folder, self.nodes, self.ranks, self.words, self.host = folder, nodes, ranks, words, host
        self.checkpoints, self.output = folder / "checkpoints", folder / "output"
        self.output.touch()
        with socket.socket() as found:
            found.bind(("localhost", 0))
            self.port = int(found.getsockname()[1])
        self.agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, agent: int, prefix: Sequence[str] = (), address: str = "", interface: str = "") -> None:
        """Starts an agent, with words before its command. Agent 0 holds the store of the job. `address`, `interface`: its own."""
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.nodes}", "--nproc-per-node", str(self.ranks),
            "--max-restarts", "100", "--monitor-interval", "0.1", "--rdzv-id", "job", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{self.host}:{self.port}", "--rdzv-conf", RENDEZVOUS.format(int(agent == 0)),
            "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *(["--local-addr", address] if address else []),
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        } | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})  # fmt: skip
        with open(self.output, "ab") as output:
            self.agents[agent] = subprocess.Popen(
                [*prefix, *torchrun, str(SCRIPT), "--folder", str(self.checkpoints), *self.words],
                stdout=output, stderr=output, env=environment, cwd=self.folder, start_new_session=True,
            )  # fmt: skip

    def workers(self, agent: int | None = None) -> list[int]:
        """The processes of the ranks of an agent, or of all."""
        agents = self.agents if agent is None else [agent]
        out = []
        for each in agents:
            for process in children(self.agents[each].pid):
                with suppress(OSError):
                    if b"elastic.py" in Path(f"/proc/{process}/cmdline").read_bytes():
                        out.append(process)
        return out

    def lose(self, agent: int) -> None:
        """Its node is lost: the agent and its ranks are killed."""
        process = self.agents.pop(agent)
        for each in [process.pid, *children(process.pid)]:
            kill(each)
        process.wait()

    def close(self) -> None:
        """Ends what is left."""
        for agent in list(self.agents):
            self.lose(agent)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def losses(self) -> list[tuple[int, float]]:
        """Each step that was computed, with its loss; some more than once."""
        return [(int(step), float(loss)) for step, loss in _LINE.findall(self.text())]

    def starts(self) -> list[int]:
        """The steps at which the job began and went on."""
        return [int(step) for step in _START.findall(self.text())]

    def wait_for(self, what: Callable[[], Any], seconds: float, words: str) -> None:
        """Until `what` is true. AssertionError with the output, where that takes longer, or the job ends before."""
        until = monotonic() + seconds
        while not what():
            assert not self.ended() or what(), f"the job ended with {self.ended()} before {words}:\n{self.text()[-6000:]}"
            assert monotonic() < until, f"no {words} within {seconds:g} s:\n{self.text()[-6000:]}"
            sleep(0.002)

    def ended(self) -> list[int]:
        """How those of the agents ended that have."""
        return [agent.returncode for agent in self.agents.values() if agent.poll() is not None]

    def wait(self, seconds: float) -> list[int]:
        """How the agents ended."""
        until = monotonic() + seconds
        while len(self.ended()) < len(self.agents):
            assert monotonic() < until, f"the job did not end within {seconds:g} s:\n{self.text()[-6000:]}"
            sleep(0.05)
        return self.ended()


class ForkedJob(ElasticJob):
    """The same without torchrun, on forked ranks, which have nothing to import: where one ends badly, all are ended and start
    again, and meet in a store that stays."""

    def __init__(self, template: ForkServer, folder: Path, ranks: int, words: Sequence[str]) -> None:
        super().__init__(folder, 1, ranks, words)
        self.template, self.attempt, self.forks = template, 0, list[Fork]()
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(self.store.port), "WORLD_SIZE": str(ranks)}
        self.environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def begin(self) -> None:
        """Starts all ranks."""
        self.attempt += 1
        self.forks = [
            self.template.fork(
                "support.harness.launch:run", str(SCRIPT), ("--folder", str(self.checkpoints), *self.words), "",
                str(self.folder / f"{self.attempt}.{rank}"),
                environment=self.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.ranks)
        ]  # fmt: skip

    def workers(self, agent: int | None = None) -> list[int]:
        return [each.pid for each in self.forks]

    def text(self) -> str:
        files = [self.folder / f"{attempt}.{rank}.{name}" for attempt in range(1, self.attempt + 1)
                 for rank in range(self.ranks) for name in ("out", "err")]  # fmt: skip
        return "".join(file.read_text() for file in files if file.exists())

    def ended(self) -> list[int]:
        """[0] once all ranks have; ranks of which one failed are started again."""
        statuses = [each.poll() for each in self.forks]
        if any(statuses):
            self.close()
            self.begin()
            return []
        return [0] if statuses and None not in statuses else []

    def wait(self, seconds: float) -> list[int]:
        self.wait_for(self.ended, seconds, "end")
        return self.ended()

    def close(self) -> None:
        for each in self.forks:
            each.kill()


class Killer:
    """Kills a random rank at a random moment, again and again."""

    def __init__(self, job: ElasticJob, seed: int, ranks: int, patience: float = 120.0) -> None:
        self.job, self.draw, self.ranks, self.patience = job, random.Random(seed), ranks, patience
        self.killed: set[int] = set()

    def kill(self, moment: str) -> None:
        """`moment`: starting, in a step, or saving."""
        job = self.job
        job.wait_for(lambda: len(self.fresh()) == self.ranks, self.patience, "new processes")
        victims, before = self.fresh(), len(job.starts())
        if moment == "starting":
            sleep(self.draw.uniform(0.0, 5.0))
        else:
            job.wait_for(lambda: len(job.starts()) > before, self.patience, "further step")
            more = len(job.losses()) + self.draw.randrange(1, 8)
            job.wait_for(lambda: len(job.losses()) >= more, self.patience, "further steps")
            if moment == "saving":
                job.wait_for(lambda: any(job.checkpoints.glob("*.tmp")), self.patience, "a checkpoint")
            else:
                sleep(self.draw.uniform(0.0, 0.05))
        kill(self.draw.choice(victims))
        self.killed |= set(victims)

    def fresh(self) -> list[int]:
        """Ranks of which none was killed, nor ended because another was."""
        return [each for each in self.job.workers() if each not in self.killed]


def children(process: int) -> list[int]:
    """Processes that it started, and those that they did."""
    found = []
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            found += [int(word) for word in (thread / "children").read_text().split()]
    return [each for child in found for each in (child, *children(child))]


def kill(process: int) -> None:
    """kill -9."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


# -- what it is compared with


@cache
def example() -> Any:
    """`examples/elastic.py` as a module."""
    spec = importlib.util.spec_from_file_location("elastic_example", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def uninterrupted(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of one process, and its parameters at the end."""
    model = example().make_model(torch.float64)
    text = example().corpus()
    batches = (example().global_batch(text, 1, step) for step in range(steps))
    return train(model, batches, example().make_optimizer).losses, model.state_dict()


def check_job(job: ElasticJob, steps: int) -> None:
    """Every loss that was computed, also in what was lost again, and what was saved last."""
    losses, state = uninterrupted(steps)
    computed = job.losses()
    assert {step for step, _ in computed} == set(range(steps))
    worst = max(abs(loss - losses[step]) / abs(losses[step]) for step, loss in computed)
    assert worst < 1e-9, worst
    model = example().make_model(torch.float64)
    found = autopar.load_checkpoint(job.checkpoints, model, example().make_optimizer(model))
    assert found is not None and found.step == steps
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
    left = sorted(path.name for path in job.checkpoints.iterdir() if path.name != "finished")  # for Slurm, see docs/elastic.md
    assert len(left) <= 3 and not any(name.endswith((".tmp", ".old")) for name in left), left
