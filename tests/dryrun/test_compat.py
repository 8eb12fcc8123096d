"""Each private torch interface of dryrun/compat.py does what a dry run thinks it does. Seen on torch 2.13.0."""

from __future__ import annotations

from typing import Any

from support.harness.rank_pool import RankPool


def watched() -> dict[str, Any]:
    """In a process of its own: two steps of an exponential on fake tensors in a fake group."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from autopar.dryrun.compat import FakeMode, MemoryWatch, fake_group
    from autopar.errors import AutoparError

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).exp()

    out: dict[str, Any] = {}
    with fake_group(3, 8):
        out["rank"], out["size"] = dist.get_rank(), dist.get_world_size()
        try:
            with fake_group(0, 2):
                pass
        except AutoparError as error:
            out["twice"] = str(error)
        with FakeMode():
            x = torch.empty(1 << 34, dtype=torch.uint8).float().requires_grad_()
            model = Doubled()
            watch = MemoryWatch()
            watch.track_external(x)
            with watch:
                for _ in range(2):
                    watch.start_step()
                    y = model(x)
                    y.sum().backward()
                    x.grad = None
                    flat = torch.empty(1024)
                    dist.all_reduce(flat)
                    torch.ops._c10d_functional.all_gather_into_tensor(flat, 8, dist.group.WORLD.group_name)  # type: ignore[union-attr]
                del y
            out["peak"], out["now"] = watch.peak.bytes, watch.current_bytes()
            out["function"], out["module"] = watch.peak.function, watch.peak.module
            out["sent"] = [[kind, *numbers] for (kind, group), numbers in sorted(watch.collectives.items())]
    out["left"] = dist.is_initialized()
    return out


def test_fake_tensors_fake_group_and_watch(ranks: RankPool) -> None:
    out = ranks.run_alone(watched)
    whole = 4 << 34  # float32: more than this machine has
    assert (out["rank"], out["size"], out["left"]) == (3, 8, False) and "joined a group" in out["twice"]
    # x, the exponential (kept), the sum's gradient (a scalar, expanded), the gradient of the double, and that of x
    assert 4 * whole <= out["peak"] < 4 * whole + 8192 and out["module"].startswith("backward")
    assert whole <= out["now"] < whole + 8192
    assert out["sent"] == [["all-gather", 1, 8 * 4096], ["all-reduce", 1, 4096]]
