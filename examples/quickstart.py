"""torchrun --nproc-per-node 4 examples/quickstart.py"""

import torch
from torch import nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 16))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


torch.manual_seed(0)
batch = {"x": torch.randn(64, 256), "target": torch.randint(0, 16, (64,))}  # the global batch, on every rank
parallel = autopar.parallelize(Net(), "local:4", example_inputs=batch)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for step in range(5):
    loss = parallel(**batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if torch.distributed.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
torch.distributed.destroy_process_group()
