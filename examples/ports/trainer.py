"""The Trainer of transformers: a small GPT-2 with evaluation, metrics and a saved model."""

import inspect
import json
import tempfile

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from autopar.integrations.transformers import Trainer  # autopar

# before: from transformers import Trainer

text = inspect.getsource(json).encode()
data = [{"input_ids": (row := torch.tensor(list(text[at : at + 16]))), "labels": row} for at in range(0, 480, 16)]


def metrics(found):
    return {"accuracy": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}


transformers.set_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, per_device_eval_batch_size=8, max_steps=3, learning_rate=1e-2,
    logging_steps=1, eval_strategy="steps", eval_steps=3, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    cluster="local",  # autopar
    model=model,
    args=args,
    train_dataset=data[:24],
    eval_dataset=data[24:],
    compute_metrics=metrics,
)
trainer.train()
model = trainer.model
logged = ("loss", "grad_norm", "eval_loss", "eval_accuracy")
losses = [each[key] for each in trainer.state.log_history for key in logged if key in each]
print(losses)
