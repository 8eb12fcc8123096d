"""A model of transformers from the meta device: weights from a folder, a step, and a folder that `from_pretrained` reads."""

import sys

import torch
import transformers

import autopar

read, written, force, kind = sys.argv[1:5]
transformers.set_seed(0)
config = transformers.AutoConfig.from_pretrained(read)
with torch.device("meta"):
    model = getattr(transformers, kind)(config)
model.train()
batch = torch.load(f"{read}/batch.pt")
parallel = autopar.parallelize(model, "local:2", batch, force=force, state=read)
optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
losses = []
for _ in range(2):
    loss = parallel(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
parallel.save_pretrained(written, max_shard_size="50KB")
if torch.distributed.get_rank() == 0:
    torch.save(losses, f"{written}/losses.pt")
