"""Trains a small Llama with DeepSpeed's ZeRO as its JSON says, on gloo processes, and prints the peak of tensors of rank 0:
``torchrun ... train_deepspeed.py ds_config.json config.json 256``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from autopar.cost_models.tensors.transient_memory import LiveBytes


def main() -> None:
    import deepspeed

    settings, sizes = json.loads(Path(sys.argv[1]).read_text()), json.loads(Path(sys.argv[2]).read_text())
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    config.use_cache = False
    shape = settings["train_micro_batch_size_per_gpu"], int(sys.argv[3])
    live = LiveBytes()
    with live:
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=settings
        )  # fmt: skip
        for _ in range(2):
            live.reset_peak()
            for _ in range(settings["gradient_accumulation_steps"]):
                ids = torch.randint(config.vocab_size, shape)
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
    if dist.get_rank() == 0:
        print(f"peak {live.peak}", flush=True)


if __name__ == "__main__":
    main()
