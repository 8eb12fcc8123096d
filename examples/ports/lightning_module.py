"""A LightningModule with a metric of validation, whose model returns the loss."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from autopar.integrations.lightning import AutoparStrategy  # autopar


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


class Task(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = Net(), []

    def training_step(self, batch, index):
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.model(*batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
rows = [(torch.randn(16), torch.randint(0, 8, ())) for _ in range(32)]
task = Task()
example = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.long))  # autopar
trainer = pl.Trainer(
    strategy=AutoparStrategy(cluster="local", example_inputs=example),  # autopar
    accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(task, DataLoader(rows, batch_size=8), DataLoader(rows[:16], batch_size=8))
model = task.model
losses = [*task.losses, trainer.callback_metrics["val_loss"].item()]
print(losses)
