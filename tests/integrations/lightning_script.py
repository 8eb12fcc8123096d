"""A Lightning script as a user has it. Started alone it uses the library's own strategy; under torchrun with degrees the lines
that differ are autopar's. Writes what it found into OUT/found.json.

    lightning_script.py OUT [--force DEGREES] [--resume DEGREES]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, target), "logits": logits}


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.register_buffer("seen", torch.zeros(()))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.seen += 1
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def predict_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.model(**batch)["loss"].reshape(1)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(shuffle: bool) -> DataLoader[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs, targets = torch.randn(22, 16, generator=generator), torch.randint(0, 8, (22,), generator=generator)
    data = [{"x": x, "target": target} for x, target in zip(xs, targets, strict=True)]
    return DataLoader(data, batch_size=4, shuffle=shuffle)  # type: ignore[arg-type]


def trainer_of(folder: str, force: str, epochs: int) -> pl.Trainer:
    keywords: dict[str, Any] = dict(
        accelerator="cpu", devices=1, max_epochs=epochs, gradient_clip_val=0.5, accumulate_grad_batches=2,
        default_root_dir=folder, logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, monitor="val_loss")],
    )  # fmt: skip
    if not force:
        return pl.Trainer(**keywords)
    from autopar.integrations.lightning import AutoparStrategy  # the changed lines of a user's script: this import ...

    example = {"x": torch.zeros(4, 16), "target": torch.zeros(4, dtype=torch.int64)}  # ... and these arguments
    strategy = AutoparStrategy(cluster="local:4", example_inputs=example, parallelize={"force": force})
    return pl.Trainer(**keywords, strategy=strategy)


def run(folder: str, force: str, epochs: int, resume: str | None = None) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    task = Task()
    trainer = trainer_of(folder, force, epochs)
    trainer.fit(task, loader(True), loader(False), ckpt_path=resume)
    found: dict[str, Any] = {"losses": task.losses, "val_loss": float(trainer.callback_metrics["val_loss"])}
    found["validated"] = trainer.validate(task, loader(False), verbose=False)
    found["predicted"] = torch.cat(trainer.predict(task, loader(False))).tolist()  # type: ignore[arg-type]
    found["best"] = os.path.basename(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--force", default="")
    parser.add_argument("--resume", default="")
    said = parser.parse_args()
    found = {"first": run(said.out, said.force, 2)}
    again = f"{said.out}/again"
    if said.resume:
        found["resumed"] = run(again, said.resume if said.force else "", 2, f"{said.out}/epoch=0.ckpt")
    if int(os.environ.get("RANK", "0")) == 0:
        saved = torch.load(f"{said.out}/epoch=1.ckpt", weights_only=False)
        task = Task()
        task.load_state_dict(saved["state_dict"])
        found["weights"] = {name: float(each.double().abs().sum()) for name, each in task.state_dict().items()}
        state = saved["optimizer_states"][0]["state"]
        found["moments"] = {str(number): float(each["exp_avg"].double().abs().sum()) for number, each in state.items()}
        with open(f"{said.out}/found.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
