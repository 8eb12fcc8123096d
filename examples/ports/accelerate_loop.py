"""accelerate: prepare, accumulate, clip, and an evaluation that gathers predictions for a metric."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from autopar.integrations.accelerate import Accelerator  # autopar

# before: from accelerate import Accelerator


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


torch.manual_seed(0)
rows = [{"x": torch.randn(16), "labels": torch.randint(0, 8, ())} for _ in range(56)]
train, test = DataLoader(rows[:40], batch_size=8, shuffle=True), DataLoader(rows[40:], batch_size=8)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, cluster="local")  # autopar
# before: accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
losses = []
for batch in train:
    with accelerator.accumulate(model):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
hits, logits = [], []
for batch in test:
    with torch.no_grad():
        outputs = model(**batch)
    predictions, labels = accelerator.gather_for_metrics((outputs["logits"].argmax(-1), batch["labels"]))
    hits.append((predictions == labels).double())
    logits.append(outputs["logits"].abs().mean().item())
losses += [torch.cat(hits).mean().item(), *logits]
print(losses)
