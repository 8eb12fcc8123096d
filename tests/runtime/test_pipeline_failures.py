"""A rank that dies, stops or fails in the middle of a schedule makes the others end with an error that names it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.harness.rank_pool import RankError, RankPool

from autopar.runtime.comm.heartbeat import Heartbeat
from autopar.runtime.errors import BatchProblem, PeerProblem

CULPRIT = 2


def node(rank: int, how: str, folder: str) -> None:
    """A process of four that takes one good step and one in which the culprit strikes. What it prints is in a file."""
    import torch
    from support.models.handwritten_pipeline import batch, built_schedule, model, pipeline_text

    from autopar.program.load import load_program
    from autopar.runtime.device.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 4), rank=rank, world_size=4)
    made = load_program(pipeline_text(built_schedule("1f1b", 4, 4), 4)).Program
    parallel = Parallel(made(MeshHandle(made.mesh_axes)), model().state_dict(), patience_seconds=12)
    parallel(**batch()).backward()
    calls: list[torch.nn.Module] = []

    def strike(module: torch.nn.Module, _: Any) -> None:
        calls.append(module)
        if len(calls) == 2 and how == "raises":
            raise ValueError("on purpose")
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    if rank == CULPRIT:
        parallel.program.get_submodule(f"chunk_{rank}").register_forward_pre_hook(strike)
    began = time.monotonic()
    try:
        parallel(**batch()).backward()
    finally:
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


@pytest.mark.parametrize(("how", "words"), [("dies", "died"), ("stops", "is stopped"), ("raises", "2F1: ValueError: on purpose")])
def test_the_others_end_and_name_it(how: str, words: str, ranks: RankPool, tmp_path: Path) -> None:
    told = [""] * 4

    def run(rank: int) -> None:
        try:
            ranks.run_alone(node, rank, how, str(tmp_path), timeout=60)
        except RankError as error:
            told[rank] = f"{error}\n{(tmp_path / str(rank)).read_text()}"

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    others = [thread for rank, thread in enumerate(threads) if rank != CULPRIT]
    for thread in others:
        thread.join(50)
    late = [thread for thread in others if thread.is_alive()]
    if how == "stops":
        os.kill(int((tmp_path / f"pid{CULPRIT}").read_text()), signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert not late
    for rank, text in enumerate(told):
        assert rank == CULPRIT or ("rank 2 (pp=2, dp=0)" in text and words in text), f"rank {rank}: {text}"


class Store:
    """In memory, shared by the heartbeats of a test."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.broken = False

    def set(self, key: str, value: str) -> None:
        if self.broken:
            raise dist.DistNetworkError("no store")
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())


def beating(store: Store, rank: int, size: int = 3, patience_seconds: float = 1.5) -> Heartbeat:
    made = Heartbeat(store, rank, size, lambda number: f"rank {number}", patience_seconds)
    made.thread.start()
    return made


def test_a_long_step_is_no_alarm() -> None:
    """Others beat; it is not they who are late. A stage that was silent before the step is not given up at once either."""
    store = Store()
    hearts = [beating(store, rank) for rank in range(3)]
    time.sleep(1.0)
    with hearts[0].watching(lambda: "a step"):
        time.sleep(2.0)
    assert all(heart.problem is None for heart in hearts)
    for heart in hearts:
        heart.close()
        assert not heart.thread.is_alive()


def test_silence_is_noticed_in_a_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    store = Store()
    alive, other = beating(store, 0, 2), beating(store, 1, 2)
    other.close()
    time.sleep(1.2)
    assert alive.problem is None
    with alive.watching(lambda: "a step"):
        time.sleep(1.6)
    assert alive.problem is not None and "rank 1 has not answered" in alive.problem and ended == [1]
    with pytest.raises(PeerProblem, match="rank 1"), alive.watching(lambda: "the next step"):
        pass


def test_an_error_of_the_network_waits_for_the_culprit() -> None:
    store = Store()
    alive, other = beating(store, 0, 2, 3.0), beating(store, 1, 2, 3.0)
    time.sleep(0.3)
    other.close()
    began = time.monotonic()
    with pytest.raises(PeerProblem, match="rank 1 has not answered"), alive.watching(lambda: "a step"):
        raise RuntimeError("[gloo] Connection closed by peer")
    assert time.monotonic() - began < 1.5  # half of what plain silence would take
    alive.close()


def test_the_first_failure_is_told() -> None:
    store = Store()
    first, second = beating(store, 0, 2), beating(store, 1, 2)
    with pytest.raises(ValueError, match="mine"), first.watching(lambda: "0F1"):
        raise ValueError("mine\nand more")
    with pytest.raises(PeerProblem, match="^rank 0 failed in 0F1: ValueError: mine$"), second.watching(lambda: "1F1"):
        raise dist.DistBackendError("gone")
    first.close()
    second.close()


def test_a_refused_batch_is_no_failure() -> None:
    heart = beating(Store(), 0)
    with pytest.raises(BatchProblem), heart.watching(lambda: "a step"):
        raise BatchProblem("too small")
    assert heart.problem is None
    heart.close()


def test_a_lost_store_is_noticed_in_a_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda status: ended.set())
    store = Store()
    heart = beating(store, 1, 2)
    store.broken = True
    time.sleep(1.0)
    assert heart.problem is None
    with heart.watching(lambda: "a step"):
        assert ended.wait(3.0)
    assert heart.problem is not None and "rank 0 does not answer, nor does the store" in heart.problem
    heart.close()
