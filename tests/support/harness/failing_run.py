"""Runs of four ranks, as torchrun starts a script of the user's, in which one of them dies, stops, fails or differs at a given
moment. Several runs go on at once: their ranks mostly wait."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

from support.harness.rank_pool import RankPool

WORLD = 4
_FIXED = "tp={},pp={},zero={},micro_batches={},recompute=none,zero_group=0,sequence_parallel=0"
PLANS = {
    "dp=4": _FIXED.format(1, 1, 0, 1),
    "dp=4,zero=3": _FIXED.format(1, 1, 3, 1),
    "dp=2,tp=2": _FIXED.format(2, 1, 0, 1),
    "pp=2,dp=2": _FIXED.format(1, 2, 0, 2),
}
"""What is forced of each plan."""
SIGNALS = {"dies": signal.SIGKILL, "stops": signal.SIGSTOP, "terminated": signal.SIGTERM}
ALONE: dict[str, Callable[[Any], object]] = {
    "full_state": lambda parallel: parallel.full_state(),
    "clip_grad_norm_": lambda parallel: parallel.clip_grad_norm_(1.0),
    ".full_tensor()": lambda parallel: [each.full_tensor() for each in parallel.parameters()],
    "a random draw for a sharded tensor": lambda parallel: [each.data.normal_() for each in parallel.parameters()],
    "mm of sharded tensors (16, 8) and (8, 16)": lambda parallel: _own_products(parallel),
    "saving a checkpoint": lambda parallel: parallel.save("/nowhere", step=1),
    "a write of an ordinary tensor into a sharded one": lambda parallel: _copy_ones(parallel),
    "load_state_dict": lambda parallel: parallel.load_state_dict(_plain_state(parallel), strict=False),
    "load_full_state": lambda parallel: parallel.load_full_state(_plain_state(parallel)),
    "load_full_optimizer_state": lambda parallel: parallel.load_full_optimizer_state(_optimizer(parallel), {}),
}
"""What needs all ranks, by its name in messages; here the culprit does it alone."""
DIFFERENCES = ("another batch", "another model", "another torch", "another autopar")


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run: `how`, `moment` and which rank; `own_store`: rank 0 holds the store, and not who starts the
    ranks."""

    plan: str
    how: str
    moment: str
    culprit: int = 2
    own_store: bool = False

    def __str__(self) -> str:
        return f"{self.plan}, rank {self.culprit} {self.how}, {self.moment}{', own store' * self.own_store}"


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: its status (None: it did not), seconds after the culprit struck, and what it wrote to stderr. `left`:
    processes that it started still run."""

    status: int | None
    seconds: float
    text: str
    left: bool


class _Run:
    """A run that goes on."""

    def __init__(
        self, ranks: RankPool, folder: Path, fault: Fault, plan: str, patience: float, join_seconds: float, whole_end: bool
    ) -> None:
        import torch.distributed as dist

        folder.mkdir()
        (folder / "plan.json").write_text(plan)
        self.folder, self.fault, self.patience = folder, fault, patience
        self.store: Any = None if fault.own_store else dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = _free_port() if self.store is None else self.store.port
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
        shared["TORCHELASTIC_USE_AGENT_STORE"] = str(not fault.own_store)
        self.forks = [
            ranks.template.fork(
                "support.harness.failing_run:run", str(folder), fault, patience, join_seconds, whole_end,
                environment=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]  # fmt: skip
        self.begun, self.struck = monotonic(), 0.0
        self.ended: dict[int, tuple[int, float]] = {}
        self.resumed = False

    def finished(self) -> bool:
        """Whether all ranks have ended, or have had twice the patience. A culprit that was stopped goes on once the others have
        ended, and has to end too."""
        if not self.struck:
            all_ended = all(fork.poll() is not None for fork in self.forks)
            if not (mark := self.folder / "struck").exists():
                return all_ended or monotonic() > self.begun + 90
            self.struck = monotonic() - (time.time() - mark.stat().st_mtime)  # all may have ended since this was last asked
        for rank, fork in enumerate(self.forks):
            if rank not in self.ended and (status := fork.poll()) is not None:
                self.ended[rank] = status, monotonic() - self.struck
        if len(self.ended) == WORLD:
            return True
        others = len(self.ended) - (self.fault.culprit in self.ended)
        if self.fault.how == "never comes" and others == WORLD - 1:
            return True
        if self.fault.how == "stops" and others == WORLD - 1 and not self.resumed:
            self.resumed, self.struck = True, monotonic()
            os.kill(self.forks[self.fault.culprit].pid, signal.SIGCONT)
        return monotonic() > self.struck + 2 * self.patience

    def outcomes(self) -> dict[int, Outcome]:
        """By rank. What still runs writes its stacks, and is ended."""
        late = [fork for rank, fork in enumerate(self.forks) if rank not in self.ended and fork.poll() is None]
        for fork in late:
            os.kill(fork.pid, signal.SIGUSR1)
        sleep(0.5 * bool(late))
        for fork in self.forks:
            fork.kill()
        texts = [(self.folder / str(rank)).read_text() for rank in range(WORLD)]
        assert self.struck, f"{self.fault}: the culprit never struck: {texts[self.fault.culprit]}"
        never: tuple[int | None, float] = None, float("inf")
        left = [_any_process(fork.pid) for fork in self.forks]
        for rank in (rank for rank in range(WORLD) if left[rank]):
            os.killpg(self.forks[rank].pid, signal.SIGKILL)
        return {rank: Outcome(*self.ended.get(rank, never), texts[rank], left[rank]) for rank in range(WORLD)}


def failing_runs(
    ranks: RankPool,
    folder: Path,
    faults: Sequence[Fault],
    plans: Callable[[str], str],
    patience: float,
    join_seconds: float = 60.0,
    whole_end: bool = False,
) -> dict[Fault, dict[int, Outcome]]:
    """The outcomes of all ranks. `plans` gives the text of a plan by its name. `whole_end`: processes end as Python does, which
    takes torch half a second of the processor for each."""
    texts = [plans(each.plan) for each in faults]  # they take longer than a rank lives
    runs = [
        _Run(ranks, folder / str(number), each, text, patience, join_seconds, whole_end)
        for number, (each, text) in enumerate(zip(faults, texts, strict=True))
    ]
    left = list(runs)
    while left:
        sleep(0.05)
        left = [each for each in left if not each.finished()]
    return {each.fault: each.outcomes() for each in runs}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _any_process(group: int) -> bool:
    """Whether a process of the group that a rank leads is there."""
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def make_plan_text(name: str) -> str:
    """The plan of that name as JSON."""
    import autopar
    from support.chain_model import model_and_batch

    model, batch = model_and_batch()
    return str(autopar.plan(model, f"local:{WORLD}", batch, force=PLANS[name]).to_json())


# -- on a rank


def run(folder: str, fault: Fault, patience: float, join_seconds: float, whole_end: bool) -> None:
    """One rank: its script, and the end of Python, which joins threads, runs handlers and destroys objects (`whole_end`)."""
    os.setpgid(0, 0)
    os.dup2(os.open(f"{folder}/{os.environ['RANK']}", os.O_CREAT | os.O_WRONLY), 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    status = 0
    try:
        from support.capture_cache import capture_cache

        with capture_cache():
            _script(folder, fault, patience, join_seconds)
    except BaseException as error:
        status = 1
        sys.last_value, sys.last_traceback = error, error.__traceback__  # Python keeps them until it ends
        sys.excepthook(type(error), error, error.__traceback__)
    (ctypes.pythonapi.Py_Exit if whole_end else os._exit)(status)


def _script(folder: str, fault: Fault, patience: float, join_seconds: float) -> None:
    rank = int(os.environ["RANK"])
    import torch

    from support.chain_model import model_and_batch

    torch.set_num_threads(1)
    mine = rank == fault.culprit

    def strike(*_: Any) -> None:
        if Path(folder, "struck").exists():
            return
        time.sleep(min(1.0, patience / 10))  # a beat tells where this rank is
        Path(folder, "struck").touch()
        if fault.how == "raises":
            raise ValueError("on purpose")
        if fault.how == "never comes":
            time.sleep(1000)
        if fault.how == "runs out of memory":
            allocate_too_much()
        if fault.how in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.how])

    model, batch = model_and_batch(8 + 4 * (mine and fault.how == "another model"))
    if mine and fault.moment == "before joining":
        strike()
    _arrange(fault, mine, strike)
    import autopar

    parallel = autopar.parallelize(
        model, f"local:{WORLD}", batch, plan=f"{folder}/plan.json", patience_seconds=patience, join_seconds=join_seconds
    )
    _train(parallel, batch, fault, strike if mine else lambda *_: None)
    _save(parallel, folder, fault, strike if mine else lambda *_: None)


def allocate_too_much() -> None:
    """Asks for a GiB where the system gives this process 64 MiB more."""
    import torch

    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + 2**26
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2**30, dtype=torch.uint8)


def _arrange(fault: Fault, mine: bool, strike: Callable[..., None]) -> None:
    """What is changed before `parallelize`."""
    import torch
    import torch.distributed as dist

    from autopar import api
    from autopar.runtime.comm import agreement

    joining, waiting, checking = dist.init_process_group, api.on_first_rank, api.check_plan
    if mine and fault.how in DIFFERENCES[1:]:  # they are found before planning, another batch when it is passed
        dist.init_process_group = lambda *args, **options: (joining(*args, **options), strike())  # type: ignore[assignment,misc]
    if mine and fault.moment == "joining":
        dist.init_process_group = lambda *args, **options: (strike(), joining(*args, **options))  # type: ignore[assignment,misc]
    if fault.moment == "planning" and fault.how not in DIFFERENCES:  # the search takes long, and meanwhile the culprit strikes
        api.check_plan = lambda *args, **options: (strike() if mine else time.sleep(60), checking(*args, **options))[1]  # type: ignore[func-returns-value]
        if mine and dist_rank():
            api.on_first_rank = lambda make: (strike(), waiting(make))[1]  # type: ignore[func-returns-value]
    if mine and fault.how == "another torch":
        torch.__version__ = "1.0"  # type: ignore[assignment]
    if mine and fault.how == "another autopar":
        agreement.metadata = SimpleNamespace(version=lambda name: "0.0.1", PackageNotFoundError=())  # type: ignore[assignment]


def dist_rank() -> int:
    """This process's rank before it has joined."""
    return int(os.environ["RANK"])


def _train(parallel: Any, batch: dict[str, Any], fault: Fault, strike: Callable[..., None]) -> None:
    """Two steps."""
    import torch

    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    mine = dist_rank() == fault.culprit
    for step in (1, 2):
        given = batch
        if mine and fault.how == "another batch" and (step == 1) == (fault.moment == "first step"):
            given = {name: value[:8] if step == 1 else value + 1 for name, value in batch.items()}
            strike()
        if mine and (step, fault.moment) in ((1, "first step"), (2, "forward")) and fault.how not in DIFFERENCES:
            list(parallel.program.blocks())[-1].register_forward_pre_hook(strike)
        if mine and (step, fault.moment) == (2, "backward") and fault.how != "leaves out":
            for block in list(parallel.program.blocks())[:-1]:
                block.register_forward_hook(lambda _, __, result: _when_backward(result, strike))
        if mine and step == 2 and fault.how == "alone":
            strike()
            ALONE[fault.moment](parallel)
        loss = parallel(**given)
        if mine and step == 1 and fault.how == "leaves out":
            strike()
        else:
            loss.backward()
        if step == 2 and fault.how == "reads":
            norms = [each.grad.norm() for each in parallel.parameters()]
            for _ in range(40):
                norms[-1].item()
            if mine:
                strike()
                norms[-1].item()
            for each in norms:
                each.item()
        if mine and (step, fault.moment) == (2, "optimizer.step"):
            optimizer.register_step_pre_hook(strike)
        optimizer.step()
        optimizer.zero_grad()


def _plain_state(parallel: Any) -> dict[str, Any]:
    """Ones for all parameters and buffers."""
    import torch

    specs = parallel.state.index.specs.items()
    return {name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs}


def _own_products(parallel: Any) -> None:
    """What Muon computes of a rank's own matrices."""
    for parameter in parallel.parameters():
        if parameter.dim() == 2:
            (parameter.detach() @ parameter.detach().T).sum().item()


def _copy_ones(parallel: Any) -> None:
    import torch

    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.copy_(torch.ones(parameter.shape, dtype=parameter.dtype))


def _optimizer(parallel: Any) -> Any:
    import torch

    return torch.optim.SGD(parallel.parameters(), lr=0.1)


def _when_backward(result: Any, strike: Callable[..., None]) -> None:
    """Strikes when the gradient of a block's result is computed."""
    for value in result if isinstance(result, tuple) else (result,):
        if value.requires_grad:
            value.register_hook(lambda gradient: strike())


def _save(parallel: Any, folder: str, fault: Fault, strike: Callable[..., None]) -> None:
    """A checkpoint of shards, and the full state."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    class Writer(checkpoint.FileSystemWriter):
        def write_data(self, *args: Any, **options: Any) -> Any:
            strike()
            return super().write_data(*args, **options)

    if fault.moment == "saving":
        checkpoint.save(parallel.state_dict(), storage_writer=Writer(f"{folder}/checkpoint"))
    if fault.moment == "checkpoint":  # a rank in its file, rank 0 in the manifest
        parallel.save(f"{folder}/checkpoints", step=1, extra={"epoch": 1})
        synced, left, sync = [], 3 if fault.culprit == 0 else 1, os.fsync

        def fsync(file: int) -> None:
            synced.append(file)
            if len(synced) == left:
                strike()
            sync(file)

        os.fsync = fsync
        parallel.save(f"{folder}/checkpoints", step=2)
    original = type(parallel.state).broadcast_full

    def broadcast(state: Any, name: str, value: Any = None) -> Any:
        if name.startswith("layers.1."):
            strike()
        return original(state, name, value)

    if fault.moment == "full_state":
        type(parallel.state).broadcast_full = broadcast
    parallel.full_state()
    torch.distributed.barrier()
