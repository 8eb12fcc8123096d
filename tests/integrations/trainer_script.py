"""A Trainer script as a user has it. Started alone it uses the library's own Trainer; under torchrun with degrees the two lines
that differ are autopar's. Writes what it found into OUT/found.json.

    trainer_script.py OUT [--force DEGREES] [--resume DEGREES] [--smoothing 0.1] [--lengths] [--dropout 0.1] [--fp16] [--lora]
        [--stream]
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import numpy
import torch
import transformers
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_sum", "step", "train_loss")


def examples(lengths: bool) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = [16 - 2 * (number % 3) if lengths else 16 for number in range(22)]
    tokens = [torch.randint(0, 64, (size,), generator=generator) for size in sizes]
    return [{"input_ids": each, "labels": each.clone()} for each in tokens]


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    pad = lambda name, value: torch.nn.utils.rnn.pad_sequence([each[name] for each in batch], True, value)  # noqa: E731
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


def metrics(found: Any) -> dict[str, float]:
    logits, labels = found.predictions, found.label_ids
    hits = (logits.argmax(-1)[:, :-1] == labels[:, 1:])[labels[:, 1:] != -100]
    return {"accuracy": float(hits.mean()), "sum": float(numpy.abs(logits[labels != -100]).sum())}


def make(model: Any, said: argparse.Namespace, folder: str, force: str) -> transformers.Trainer:
    args = TrainingArguments(
        output_dir=folder, per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=6, learning_rate=1e-2,
        weight_decay=0.1, max_grad_norm=0.5, gradient_accumulation_steps=2, logging_steps=1, save_steps=3, eval_steps=3,
        eval_strategy="steps", warmup_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, seed=3,
        label_smoothing_factor=said.smoothing, fp16=said.fp16 and bool(force),
    )  # fmt: skip
    data = examples(said.lengths)
    train = Stream(data) if said.stream else data
    keywords: dict[str, Any] = dict(
        model=model, args=args, train_dataset=train, eval_dataset=data[:6], compute_metrics=metrics, data_collator=padded
    )
    if not force:
        return transformers.Trainer(**keywords)
    from autopar.integrations.transformers import Trainer  # the changed lines of a user's script: this import ...

    return Trainer(**keywords, cluster="local:4", parallelize={"force": force})  # ... and the arguments of this call


def new_model(dropout: float, lora: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=32, bos_token_id=0, eos_token_id=0)
    drops = dict(resid_pdrop=dropout, embd_pdrop=0.0, attn_pdrop=0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops))
    if not lora:
        return model
    import peft

    targets = dict(target_modules=["c_attn"], modules_to_save=["lm_head"], fan_in_fan_out=True)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.0, **targets))


def saved_state(folder: str, lora: bool) -> dict[str, torch.Tensor]:
    """What `from_pretrained` reads, of adapters too."""
    if not lora:
        return GPT2LMHeadModel.from_pretrained(folder).state_dict()
    import peft

    return peft.PeftModel.from_pretrained(new_model(0.0), folder).state_dict()


def history(trainer: transformers.Trainer) -> list[dict[str, float]]:
    return [{key: value for key, value in each.items() if key in LOGGED} for each in trainer.state.log_history]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--force", default="")
    parser.add_argument("--resume", default="")
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lengths", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--stream", action="store_true", help="the training data is an IterableDataset")
    parser.add_argument("--fp16", action="store_true", help="in the parallel run; the library's own needs a GPU for it")
    said = parser.parse_args()
    transformers.logging.set_verbosity_error()
    trainer = make(new_model(said.dropout, said.lora), said, said.out, said.force)
    trainer.train()
    predicted = trainer.predict(examples(said.lengths)[3:8])
    trainer.save_model(f"{said.out}/final")
    found: dict[str, Any] = {
        "log": history(trainer),
        "predicted": metrics(predicted) | {"loss": predicted.metrics["test_loss"], "shape": predicted.predictions.shape},
    }
    if said.resume:
        again = make(new_model(said.dropout, said.lora), said, said.out, said.resume if said.force else "")
        again.train(resume_from_checkpoint=f"{said.out}/checkpoint-3")
        found["resumed"] = history(again)
        if said.force and said.fp16:
            scaler = again.accelerator.scaler.state_dict()
            found["scaler"] = [scaler["scale"], scaler["_growth_tracker"]]
    if int(os.environ.get("RANK", "0")) == 0:
        state = saved_state(f"{said.out}/final", said.lora)
        names = sorted(os.listdir(f"{said.out}/final"))
        found["files"] = [name for name in names if name.endswith((".safetensors", "config.json"))]
        found["weights"] = {name: float(tensor.double().abs().sum()) for name, tensor in state.items()}
        with open(f"{said.out}/found.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
