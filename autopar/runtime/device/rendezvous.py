"""The meeting of a run's processes before their process group is made: who never comes is named, within a time."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from ..errors import LaunchProblem

JOIN_SECONDS = 300.0
_POLL_SECONDS = 0.1
_NAMED = 8
"""The number of missing ranks that are named."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Meeting(NamedTuple):
    """The store that all processes of the run have reached, with nothing in it yet, and this one's place among them."""

    store: Any
    rank: int
    size: int


def meet(join_seconds: float = JOIN_SECONDS) -> Meeting:
    """Wait until all processes that were launched are there. LaunchProblem on all that are, where one is missing after
    `join_seconds`; the message names it."""
    lacking = next((name for name in _VARIABLES if not os.environ.get(name)), None)
    if lacking is not None:
        raise LaunchProblem(f"{lacking} is not set in the environment: start the script with torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    until = time.monotonic() + join_seconds
    store = _reach_store(rank, size, until, join_seconds)
    try:
        name = await_all(store, rank, size, until, join_seconds)
    except RuntimeError as error:
        raise LaunchProblem(f"the store of the run was lost while ranks were joining: {_first_line(error)}") from error
    return Meeting(torch.distributed.PrefixStore(f"autopar/run/{name}", store), rank, size)  # type: ignore[attr-defined]


def _reach_store(rank: int, size: int, until: float, join_seconds: float) -> Any:
    """The store, which torchrun or rank 0 holds."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    holder = "rank 0" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" else "torchrun"
    while not holds and not answers(address, port):
        if time.monotonic() > until:
            raise LaunchProblem(
                f"{holder}, which holds the store of the run, does not answer at {address}:{port} (MASTER_ADDR, MASTER_PORT) "
                f"within {join_seconds:g} s: see its own output, and start all ranks again"
            )
        time.sleep(_POLL_SECONDS)
    try:
        return torch.distributed.TCPStore(  # type: ignore[attr-defined]
            address, port, size, holds, timeout=timedelta(seconds=300), wait_for_workers=False, multi_tenant=True
        )
    except RuntimeError as error:
        raise LaunchProblem(
            f"{holder} has no store at {address}:{port} (MASTER_ADDR, MASTER_PORT): {_first_line(error)}"
        ) from error


def answers(address: str, port: int) -> bool:
    """Return whether somebody listens there."""
    with suppress(OSError), socket.create_connection((address, port), timeout=2.0):
        return True
    return False


def await_all(store: Any, rank: int, size: int, until: float, join_seconds: float) -> str:
    """Wait for all ranks; the name of the meeting, which is new. The store may be that of torchrun, which outlives a restart,
    and have words of processes that have died: rank 0 proposes a meeting of those whose words it finds, which begins once all
    of them have agreed and rank 0 has seen that. Whoever comes later replaces the words of a process of its rank, and rank 0
    proposes again."""
    prefix, own = f"autopar/joining/{size}", uuid4().hex
    store.set(f"{prefix}/{rank}", f"{own} {socket.gethostname()}")
    store.add(f"{prefix}/arrivals", 1)
    seen, proposal, agreed = 0, "", ""
    while True:
        if store.check([f"{prefix}/missing/{own}"]):
            raise LaunchProblem(store.get(f"{prefix}/missing/{own}").decode())
        if rank == 0 and (came := store.add(f"{prefix}/arrivals", 0)) != seen:
            seen, words = came, _arrivals(store, prefix, size)
            if len(words) == size:
                name = uuid4().hex
                store.set(f"{prefix}/proposal", " ".join([name, *(words[each][0] for each in range(size))]))
        if store.check([f"{prefix}/proposal"]):
            proposal = store.get(f"{prefix}/proposal").decode()
        name, *invited = proposal.split() or [""]
        if name != agreed and len(invited) == size and invited[rank] == own:
            agreed = name
            store.set(f"{prefix}/{name}/{rank}", "agreed")
            store.add(f"{prefix}/{name}/agreed", 1)
        if rank == 0 and agreed and store.add(f"{prefix}/{agreed}/agreed", 0) == size:
            store.set(f"{prefix}/{agreed}/begun", "")
        if agreed and store.check([f"{prefix}/{agreed}/begun"]):
            return agreed
        if time.monotonic() > until:
            invitation = agreed if name == agreed else ""
            raise LaunchProblem(_missing(store, prefix, size, invitation, join_seconds))
        time.sleep(_POLL_SECONDS)


def _arrivals(store: Any, prefix: str, size: int) -> dict[int, list[str]]:
    """Return the words of the ranks that came: a word of each process's own, and its host."""
    came = [rank for rank in range(size) if store.check([f"{prefix}/{rank}"])]
    return {rank: store.get(f"{prefix}/{rank}").decode().split(" ", 1) for rank in came}


def _missing(store: Any, prefix: str, size: int, invitation: str, join_seconds: float) -> str:
    """The message, which the first rank that has waited long enough writes for all. `invitation`: a meeting that this rank has
    agreed to and others have not."""
    words = _arrivals(store, prefix, size)
    absent = [rank for rank in range(size) if rank not in words]
    if not absent:  # words of some of them are those of processes that have died
        absent = [rank for rank in range(size) if not store.check([f"{prefix}/{invitation}/{rank}"])] if invitation else [0]
    hosts = {rank: host for rank, (_, host) in words.items() if rank not in absent}
    named = ", ".join(f"rank {rank}" for rank in absent[:_NAMED]) + (" ..." if len(absent) > _NAMED else "")
    places = ", ".join(sorted(set(hosts.values()))[:_NAMED])
    text = (
        f"{len(hosts)} of {size} processes joined within {join_seconds:g} s, on {places}: {named} never came; see its own "
        f"output, and start all ranks again (join_seconds= waits longer)"
    )
    first = words[min(hosts, default=min(words))][0]
    message: str = store.compare_set(f"{prefix}/missing/{first}", "", text).decode() or text
    for word, _ in words.values():
        store.set(f"{prefix}/missing/{word}", message)
    time.sleep(10 * _POLL_SECONDS)  # the others read it before the store ends with the process that holds it
    return message


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
