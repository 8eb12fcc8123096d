"""What torchrun does with a script, on forked processes: the ranks' environment and a store; no imports to wait for."""

from __future__ import annotations

import importlib.abc
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from support.harness.rank_pool import RankPool


@dataclass(frozen=True, slots=True)
class Ended:
    """How the process of a rank ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str


def launch(ranks: RankPool, script: Path, world: int, *words: str, without: str = "", timeout: float = 120.0) -> list[Ended]:
    """Runs a script on `world` processes, or on one as python starts it (0), in the script's folder; `without`: a package that
    they cannot import."""
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with tempfile.TemporaryDirectory() as folder:
        forks = [
            ranks.template.fork(
                "support.harness.launch:run", str(script), words, without, f"{folder}/{rank}",
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {},
            )
            for rank in range(world or 1)
        ]  # fmt: skip
        end = monotonic() + timeout
        while any(fork.poll() is None for fork in forks) and monotonic() < end:
            sleep(0.02)
        out = []
        for rank, fork in enumerate(forks):
            status = fork.poll()
            fork.kill()
            said = [Path(folder, f"{rank}.{name}").read_text() for name in ("out", "err")]
            assert status is not None, f"rank {rank} did not end within {timeout:g} s: {said[1]}"
            out.append(Ended(status, *said))
    return out


class _Without(importlib.abc.MetaPathFinder):
    """Finds no package of one name."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] == self.package:
            raise ImportError(f"{name} is not to be imported here")


def _captures() -> AbstractContextManager[None]:
    from support.capture_cache import capture_cache  # only here: it imports autopar

    return capture_cache()


def run(script: str, words: tuple[str, ...], without: str, target: str) -> None:
    """On a rank."""
    for name, handle in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{target}.{name}", os.O_CREAT | os.O_WRONLY), handle)
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    os.chdir(Path(script).parent)
    if without:
        for name in [name for name in sys.modules if name.split(".")[0] == without]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Without(without))
    with nullcontext() if without else _captures():
        runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()


def spawn(ranks: RankPool, function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """``torch.multiprocessing.spawn`` of a function of the product, on forked processes."""
    address = f"{function.__module__}:{function.__name__}"
    forks = [ranks.template.fork(address, rank, *args, environment={}) for rank in range(nprocs)]
    try:
        failed = [rank for rank, fork in enumerate(forks) if fork.wait()]
    finally:
        for fork in forks:
            fork.kill()
    assert not failed, f"ranks {failed} failed"
