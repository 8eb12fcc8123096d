"""A script for DistributedDataParallel: a sampler that deals the data out, `rank == 0` blocks, `.module` for saving."""

import io

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar  # autopar

# before: from torch.nn.parallel import DistributedDataParallel as DDP
# before: from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


# before: dist.init_process_group("gloo")
torch.manual_seed(0)
dataset, global_batch = TensorDataset(torch.randn(64, 16), torch.randint(0, 8, (64,))), 16
model = Net()
model = autopar.parallelize(model, "local", example_inputs=dataset[:global_batch])  # autopar
sampler = model.sampler(dataset)  # autopar
# before: model = DDP(model)
# before: sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=global_batch // sampler.num_replicas, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = model(model.local_batch(x=x, y=y))  # autopar
        # before: loss = model(x=x, y=y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
state = model.full_state()  # autopar
# before: state = model.module.state_dict()
if dist.get_rank() == 0:
    print(losses)
    torch.save(state, io.BytesIO())
