"""LoRA by peft and the Trainer of transformers; the adapters are saved as peft saves them, and read again."""

import inspect
import json
import tempfile

import peft
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from autopar.integrations.transformers import Trainer  # autopar

# before: from transformers import Trainer

text = inspect.getsource(json).encode()
data = [{"input_ids": (row := torch.tensor(list(text[at : at + 16]))), "labels": row} for at in range(0, 384, 16)]


def base():
    transformers.set_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


model = peft.get_peft_model(base(), peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
folder = tempfile.mkdtemp()
args = TrainingArguments(
    output_dir=folder, per_device_train_batch_size=8, max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no",
    report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    cluster="local",  # autopar
    model=model,
    args=args,
    train_dataset=data,
)
trainer.train()
trainer.save_model(folder)
model = trainer.model
losses = [each[key] for each in trainer.state.log_history for key in ("loss", "grad_norm") if key in each]
if args.process_index == 0:
    again = peft.PeftModel.from_pretrained(base(), folder)
print(losses)
