"""The usual loop of accelerate. Started alone it uses the library's own accelerator; under torchrun with degrees the lines that
differ are autopar's. Prints what it found on rank 0.

    accelerate_script.py [--force DEGREES [--fp16] [--ranks FOLDER]]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from time import sleep
from typing import Any

import torch
from accelerate.utils import ProfileKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layers(x), target)


def train(accelerator: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    data = [{"x": torch.randn(16), "target": torch.randint(0, 8, ())} for _ in range(22)]
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, norms = [], []
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach().reshape(1)).mean().item())
    state = accelerator.get_state_dict(model)
    return {"losses": losses, "norms": norms, "weights": {name: float(each.abs().sum()) for name, each in state.items()}}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return iter({"x": torch.full((16,), float(row)), "target": torch.tensor(row)} for row in range(8))


def rank_report(accelerator: Any, folder: Path) -> dict[str, Any]:
    """What this rank reads by the accelerator's numbers and from a stream, which functions run here, whether it sees what the
    main process has written and set, and whose trace is."""
    ran: list[str] = []
    for name in ("on_main_process", "on_last_process", "on_local_main_process"):
        getattr(accelerator, name)(ran.append)(name)
    accelerator.on_process(process_index=0)(ran.append)("on_process")
    sampler = DistributedSampler(range(8), accelerator.num_processes, accelerator.process_index, shuffle=False)  # type: ignore[arg-type]
    _, loader = accelerator.prepare(Net(), DataLoader(Stream(), 4))
    with accelerator.profile(ProfileKwargs(output_trace_dir=str(folder))):
        accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.set_trigger()
        sleep(0.5)
        torch.save({}, folder / "saved.pt")
    accelerator.wait_for_everyone()
    read = [batch["target"].tolist() for batch in loader]
    files = sorted(each.name for each in folder.iterdir())
    stops = [accelerator.check_trigger(), accelerator.check_trigger()]
    found = {"rows": list(sampler), "read": read, "files": files, "stops": stops}
    return found | {"ran": ran, "last": accelerator.is_last_process}


def refused() -> str:
    """What the library's own accelerator says of a parallel model."""
    import accelerate

    import autopar

    batch = {"x": torch.randn(4, 16), "target": torch.zeros(4, dtype=torch.int64)}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    parallel = autopar.parallelize(Net(), "local:4", example_inputs=batch)
    try:
        accelerator.prepare(parallel)
    except autopar.AutoparError as error:
        return str(error)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--force", default="")
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--ranks", default="", help="a folder: report what each rank reads and runs, instead of training")
    said = parser.parse_args()
    keywords: dict[str, Any] = dict(cpu=True, gradient_accumulation_steps=2)
    if said.force:
        from autopar.integrations.accelerate import Accelerator  # the changed lines of a user's script: this import ...

        half = {"mixed_precision": "fp16"} if said.fp16 else {}
        accelerator = Accelerator(
            **keywords, **half, cluster="local:4", parallelize={"force": said.force}
        )  # ... and these arguments
        if said.ranks:
            sys.stdout.write(f"FOUND {json.dumps(rank_report(accelerator, Path(said.ranks)))}\n")
            return
        found = train(accelerator)
        if said.fp16:
            found["scale"] = accelerator.scaler.get_scale()
        found["refused"] = refused()
    else:
        import accelerate

        found = train(accelerate.Accelerator(**keywords))
    if int(os.environ.get("RANK", "0")) == 0:
        sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    main()
