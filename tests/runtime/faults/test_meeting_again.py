"""Processes that meet in a store which outlives them, as torchrun's does: words of those that died are told from others."""

from __future__ import annotations

import threading
from datetime import timedelta
from time import monotonic

import pytest
import torch.distributed as dist

from autopar.runtime.device import rendezvous
from autopar.runtime.device.rendezvous import LaunchProblem, Meeting


class Runs:
    """Ranks as threads, which meet in one store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setattr(rendezvous, "_POLL_SECONDS", 0.02)

    def start(self, size: int, ranks: list[int], seconds: float) -> dict[int, Meeting | str]:
        """What `ranks` of `size` meet, or are told."""
        out: dict[int, Meeting | str] = {}

        def one(rank: int) -> None:
            store = dist.TCPStore("localhost", self.server.port, is_master=False, timeout=timedelta(seconds=20))
            try:
                name = rendezvous.await_all(store, rank, size, monotonic() + seconds, seconds)
                out[rank] = Meeting(dist.PrefixStore(name, store), rank, size)
            except LaunchProblem as problem:
                out[rank] = str(problem)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    def meets(self, size: int) -> None:
        """All meet, in a store that has nothing of the runs before."""
        found = self.start(size, list(range(size)), 20.0)
        for rank, meeting in found.items():
            assert isinstance(meeting, Meeting), meeting
            meeting.store.set(str(rank), "here")
        for meeting in found.values():
            assert isinstance(meeting, Meeting)
            assert meeting.store.add("count", 1) <= size and all(meeting.store.check([str(rank)]) for rank in range(size))

    def leaves_words(self, size: int, ranks: list[int]) -> None:
        """Processes that came and were killed while they waited."""
        for rank in ranks:
            self.server.set(f"autopar/joining/{size}/{rank}", f"dead{rank} elsewhere")
            self.server.add(f"autopar/joining/{size}/arrivals", 1)


def test_after_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks are killed before they have joined, and the number of processes changes."""
    runs = Runs(monkeypatch)
    for size, killed in ((4, []), (4, [0, 1, 3]), (2, [1]), (4, [2]), (4, []), (1, []), (2, [0, 1]), (3, [0, 1, 2])):
        runs.leaves_words(size, killed)
        runs.meets(size)


def test_who_is_missing_after_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(monkeypatch)
    runs.meets(3)
    runs.leaves_words(3, [0, 1, 2])
    for absent in (0, 2):
        said = runs.start(3, [rank for rank in range(3) if rank != absent], 0.5)
        for text in said.values():
            assert isinstance(text, str) and f"rank {absent} never came" in text and "within 0.5 s" in text, text
    runs.meets(3)
