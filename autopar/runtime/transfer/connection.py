"""The connection of the job that sends weights and the one that receives them: they meet in a store that the sender's first rank
holds, and get a process group of their own, beside those of each job."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from ..device.rendezvous import answers, await_all
from ..errors import AutoparError, LaunchProblem, TransferProblem, one_line
from .weight_layout import WeightLayout

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Endpoint:
    """One rank of one of the two jobs, and where they meet: `address` is ``host:port`` of the sender's first rank."""

    address: str
    sends: bool
    rank: int
    size: int
    join_seconds: float

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of the address. TransferProblem where it is none."""
        host, _, port = str(self.address).rpartition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
            raise TransferProblem(f"{self.address!r} is no address: pass host:port of the first rank that sends weights")
        return host.strip("[]"), int(port)

    def store(self, holds: bool = False) -> Any:
        """Return the store, which the first rank that sends `holds`. TransferProblem where it does not answer."""
        (host, port), until = self.host_and_port, time.monotonic() + self.join_seconds
        while not holds and not answers(host, port):
            if time.monotonic() > until:
                raise TransferProblem(
                    f"nobody sends weights at {self.address} within {self.join_seconds:g} s: call send_weights there, on "
                    "all ranks (join_seconds= waits longer)"
                )
            time.sleep(_POLL_SECONDS)
        patience = timedelta(seconds=self.join_seconds)
        try:
            return torch.distributed.TCPStore(  # type: ignore[attr-defined]
                host, port, None, holds, timeout=patience, wait_for_workers=False
            )
        except RuntimeError as error:
            raise TransferProblem(
                f"there is no store at {self.address} ({one_line(str(error))[:200]}): pass a free port of the sender's first rank"
            ) from error


@dataclass(frozen=True)
class Connection:
    """The group of both jobs, senders first, and what each of them has said: its layout, and the hosts of its ranks."""

    group: Any
    source: WeightLayout
    target: WeightLayout
    hosts: tuple[list[str], list[str]]
    memory_bytes: int


def offer(end: Endpoint, layout: WeightLayout, memory_bytes: int) -> Any:
    """Return the store, which the first rank of the senders makes, with the invitation to a new meeting."""
    store = end.store(holds=True)
    store.set("source", json.dumps([uuid4().hex, end.size, memory_bytes, layout.to_json()]))
    return store


def connect(
    end: Endpoint, store: Any, layout: Callable[[WeightLayout], WeightLayout], check: Callable[[WeightLayout], Any]
) -> Connection:
    """Return the connection, once all ranks of both jobs are there. `layout`: that of the receivers, from the senders'; `check`
    looks at this rank's tensors. TransferProblem names who never came, and on all ranks what does not fit."""
    try:
        return _connect(end, store, layout, check)
    except LaunchProblem as problem:
        raise TransferProblem(str(problem)) from problem
    except RuntimeError as error:
        raise TransferProblem(
            f"the store at {end.address} was lost while both jobs were joining: call send_weights and receive_weights again"
        ) from error


def _connect(
    end: Endpoint, store: Any, layout: Callable[[WeightLayout], WeightLayout], check: Callable[[WeightLayout], Any]
) -> Connection:
    until = time.monotonic() + end.join_seconds
    name, senders, memory_bytes, text = json.loads(_await(store, "source", "senders", until, end))
    source = WeightLayout.from_json(text)
    meeting = torch.distributed.PrefixStore(f"autopar/weights/{name}", store)  # type: ignore[attr-defined]
    if not end.sends and end.rank == 0:
        meeting.set("target", json.dumps(_target(end, source, layout)))
    problem, receivers, text = json.loads(_await(meeting, "target", "receivers", until, end))
    if problem:
        raise TransferProblem(problem)
    target = WeightLayout.from_json(text)
    rank, size = end.rank + (0 if end.sends else senders), senders + receivers
    await_all(meeting, rank, size, until, end.join_seconds)
    own = _problem(lambda: check(source if end.sends else target))
    meeting.set(f"ready/{rank}", json.dumps([own, socket.gethostname()]))
    ready = [json.loads(meeting.get(f"ready/{each}")) for each in range(size)]
    problem = next((text for text, _ in ready if text), "")
    if problem:
        raise TransferProblem(problem)
    group = dist.ProcessGroupGloo(meeting, rank, size, timedelta(seconds=end.join_seconds))
    hosts = [host for _, host in ready]
    return Connection(group, source, target, (hosts[:senders], hosts[senders:]), memory_bytes)


def _target(end: Endpoint, source: WeightLayout, layout: Callable[[WeightLayout], WeightLayout]) -> tuple[str, int, str]:
    """Return what the first rank that receives says: what is wrong, the number of its ranks, and their layout."""
    try:
        target = layout(source)
    except AutoparError as error:
        return str(error), end.size, ""
    if target.size != end.size:
        return f"the layout of the receivers is for {target.size} ranks, and {end.size} receive: pass their own", end.size, ""
    return "", end.size, target.to_json()


def _problem(work: Callable[[], Any]) -> str:
    try:
        work()
    except AutoparError as error:
        return str(error)
    return ""


def _await(store: Any, key: str, who: str, until: float, end: Endpoint) -> bytes:
    """Return what the first rank of the `who` has said. TransferProblem where it says nothing."""
    while not store.check([key]):
        if time.monotonic() > until:
            call = "send_weights" if who == "senders" else "receive_weights"
            raise TransferProblem(
                f"rank 0 of the {who} never came to {end.address} within {end.join_seconds:g} s: call {call} on all its ranks "
                "(join_seconds= waits longer)"
            )
        time.sleep(_POLL_SECONDS)
    value: bytes = store.get(key)
    return value
