"""Each private torch interface of runtime/report/observe.py does what a measurement thinks it does. Seen on torch 2.13.0."""

from __future__ import annotations

from typing import Any

from support.harness.rank_pool import RankPool


def observed() -> dict[str, Any]:
    """On each of two ranks: what is seen of collectives of every way to launch one."""
    import threading

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from autopar.runtime.report.observe import Launched, Observer, PeakWatch, observing

    class Seen(Observer):
        def __init__(self) -> None:
            self.launches: list[Launched] = []
            self.waits: list[str] = []
            self.open = 0

        def launched(self, collective: Launched) -> None:
            self.launches.append(collective)

        def waiting(self, collective: Launched | None, since: float) -> None:
            self.open += 1
            self.waits.append(collective.kind if collective is not None else "unknown")

        def wait_ended(self) -> None:
            self.open -= 1

    originals = dist.ProcessGroup.allreduce, dist.Work.wait, torch.ops._c10d_functional.all_reduce
    seen, group = Seen(), str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    x, other = torch.ones(8), 1 - dist.get_rank()
    linear = torch.nn.Linear(8, 8)
    fully_shard(linear, mesh=init_device_mesh("cpu", (2,)))
    out: dict[str, Any] = {}
    with observing(seen):
        dist.all_reduce(x.clone())
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 2, group))
        for work in (dist.isend(x, other), dist.irecv(x.clone(), other)):
            assert work is not None
            work.wait()
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        thread.start()
        thread.join()
        out["plain"], seen.launches = [(each.kind, each.bytes) for each in seen.launches], []
        out["waits"], seen.waits = seen.waits, []
        linear(torch.ones(1, 8)).sum().backward()
        out["fsdp"], out["fsdp waits"] = [each.kind for each in seen.launches], sorted(set(seen.waits))
    out["open"] = seen.open
    out["restored"] = originals == (dist.ProcessGroup.allreduce, dist.Work.wait, torch.ops._c10d_functional.all_reduce)
    peak = PeakWatch(torch.device("cpu"))
    before = torch.ones(1000)
    assert peak.start()
    made = torch.ones(3000) + 1
    del before, made
    out["left"] = torch.ones(500).numel()
    out["peak"] = peak.stop()
    return out


def test_what_is_seen(ranks: RankPool) -> None:
    for out in ranks.run(observed, world=2):
        assert out["plain"] == [("all-reduce", 32), ("all-gather", 64), ("send", 32), ("receive", 32)]
        assert out["waits"] == ["all-reduce", "all-gather", "send", "receive"]
        assert out["fsdp"] == ["all-gather", "reduce-scatter"] and "all-gather" in out["fsdp waits"]
        assert out["open"] == 0 and out["restored"]
        assert 24000 <= out["peak"] < 24100
