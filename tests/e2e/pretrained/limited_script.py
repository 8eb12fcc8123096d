"""A model that does not fit into what memory this process may have: from safetensors to shards, steps, a checkpoint, an export.

Prints how far the process's peak of memory went beyond what it had before, in bytes, and how much it was allowed."""

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar

WIDTH, INNER = 512, 2048


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def memory(key: str) -> int:
    """Bytes that the system says of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def main(folder: str, force: str, depth: int, share: float) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    world = int(os.environ["WORLD_SIZE"])
    autopar.plan(Deep(1), "local:1", {"x": x}, cache=None)  # loads what planning needs
    with torch.device("meta"):
        model = Deep(depth)
    whole = 4 * sum(each.numel() for each in model.parameters())
    dist.init_process_group("gloo")
    plan = f"{folder}/plan_{force.replace(',', '_')}.json" if world > 1 else None
    libc = ctypes.CDLL(None)
    libc.mallopt(-8, 1)  # one arena: others take address space for each thread
    libc.mallopt(-3, 65536)  # what MALLOC_MMAP_THRESHOLD_ says: glibc's own, which grows, keeps several times of what is freed
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, allowed = memory("VmRSS"), int(share * whole)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + allowed, resource.RLIM_INFINITY))
    parallel = autopar.parallelize(model, f"local:{world}", {"x": x}, plan=plan, state=f"{folder}/weights", cache=False)
    print("loaded", memory("VmHWM") - before, whole, flush=True)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3, foreach=False)
    for _ in range(2):
        loss = parallel(x=x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    parallel.save(f"{folder}/checkpoints", optimizer, step=2).wait()
    parallel.save_pretrained(f"{folder}/export", "30MB")
    found = parallel.load(f"{folder}/checkpoints", optimizer)
    assert found is not None and found.step == 2
    parallel.load_pretrained(f"{folder}/export")
    print("done", memory("VmHWM") - before, allowed, loss.item(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
