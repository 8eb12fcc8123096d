"""The machine at hand as a cluster: processes that share its cores (or one GPU each), joined by gloo (or NCCL), measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_models.hardware import Cluster, Device, Link, preset_path, read, scaled
from autopar.errors import ClusterError

_TIME_LIMIT_SECONDS = 120.0


def machine_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def described(processes: int) -> Cluster:
    """`local:processes` from the description beside this file; only the memory is this machine's, divided evenly."""
    one = read(preset_path("local"), "local")
    device = replace(one.device, memory_bytes=machine_memory_bytes() // processes)
    return replace(scaled(one, f"local:{processes}", processes), device=device)


def cached(processes: int, folder: Path) -> Cluster:
    """The measured cluster, from `folder` where it was measured before. A file that cannot be read is measured anew."""
    path = folder / f"local-{processes}-{platform.node() or 'machine'}-torch{torch.__version__}.json"
    try:
        return Cluster.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, ClusterError):
        measured = measure_local(processes)
        folder.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(measured.to_dict(), indent=1))
        draft.replace(path)
        return measured


def measure_local(processes: int) -> Cluster:
    """Starts `processes` processes that work at the same time, as in training; the slowest counts. ClusterError on failure."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from autopar.cost_models.local import measure_rank as m; m(*map(int, sys.argv[1:3]), sys.argv[3])"
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(rank), str(processes), folder], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for rank in range(processes)
        ]
        deadline = time.monotonic() + _TIME_LIMIT_SECONDS
        try:
            for rank in ranks:
                _, errors = rank.communicate(timeout=max(0.0, deadline - time.monotonic()))
                if rank.returncode:
                    line = (errors.decode().strip().splitlines() or ["no message"])[-1]
                    raise ClusterError(
                        f"measuring local:{processes} failed ({line}); describe the machine in a .yaml file instead"
                    )
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"measuring local:{processes} took over {_TIME_LIMIT_SECONDS:.0f} s; use fewer processes"
            ) from None
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.communicate()
        seen = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(processes)]
    return _cluster(processes, seen)


def _cluster(processes: int, seen: list[dict[str, Any]]) -> Cluster:
    template = described(processes)
    slowest = {key: min(one["peak"][key] for one in seen) for key in seen[0]["peak"]}
    device = Device(
        name=str(seen[0]["name"]),
        kind=str(seen[0]["kind"]),
        peak=tuple(slowest.items()),
        memory_bytes=int(seen[0]["memory_bytes"] or template.device.memory_bytes),
        bandwidth_bytes_per_second=min(one["bandwidth"] for one in seen),
        launch_seconds=max(one["launch"] for one in seen),
        matmul_fraction=1.0,
        attention_fraction=template.device.attention_fraction,
        bandwidth_fraction=1.0,
        base_bytes=template.device.base_bytes,
    )
    link = Link("nvlink" if device.kind == "cuda" else "loopback", processes, *_link(processes, seen))
    return Cluster(template.name, device, (link,), processes)


def _link(processes: int, seen: list[dict[str, Any]]) -> tuple[float, float]:
    """Bandwidth and step latency from all-reduces of two sizes: ``t = 2 (n-1) a + 2 (n-1)/n N / b``."""
    if processes == 1:
        return 1e9, 1e-6
    (small, fast), (large, slow) = (max((tuple(one["collectives"][i]) for one in seen), key=lambda pair: pair[1]) for i in (0, 1))
    steps = 2 * (processes - 1)
    bandwidth = steps / processes * (large - small) / max(slow - fast, 1e-9)
    return bandwidth, max(1e-7, (fast - steps / processes * small / bandwidth) / steps)


def measure_rank(rank: int, size: int, folder: str) -> None:
    """One of `size` processes: writes what it measured to ``folder/rank.json``. The machine's cores are divided evenly."""
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= size
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    try:
        found = _measure(device, size)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


def _measure(device: torch.device, size: int) -> dict[str, Any]:
    cuda = device.type == "cuda"
    side = 4096 if cuda else 512
    peak = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        a = torch.ones(side, side, dtype=dtype, device=device)
        peak[str(dtype).removeprefix("torch.")] = 2.0 * side**3 / _seconds(partial(torch.mm, a, a), device)
    big = torch.ones(2**28 if cuda else 2**23, device=device)
    copied = 2 * big.numel() * big.element_size() / _seconds(partial(torch.add, big, 1.0, out=big), device)
    launch = _seconds(partial(torch.add, torch.ones(8, device=device), 1.0), device)
    collectives = []
    for count, times in ((2**8, 40), (2**26 if cuda else 2**21, 8)):
        data = torch.zeros(count, device=device)
        collectives.append((4 * count, _seconds(partial(dist.all_reduce, data), device, times) if size > 1 else 0.0))
    return {
        "name": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU process",
        "kind": device.type,
        "peak": peak,
        "bandwidth": copied,
        "launch": launch,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if cuda else 0,
        "collectives": collectives,
    }


def _seconds(call: Callable[[], object], device: torch.device, times: int = 0) -> float:
    """Mean seconds of `times` calls, or of as many as fit a quarter of a second (a mean, since processes may share a core and
    are then stopped for many calls at a time). All ranks start together."""
    call()
    dist.barrier()
    start = time.perf_counter()
    done = 0
    while done < times if times else time.perf_counter() < start + 0.25:
        call()
        done += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / done
