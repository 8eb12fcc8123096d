"""LoRA by peft in a loop of one's own: the optimizer has the adapters only."""

import inspect
import json

import peft
import torch
import transformers

import autopar  # autopar

text = inspect.getsource(json).encode()
data = torch.tensor(list(text[: 4 * 16 * 16])).view(4, 16, 16)
transformers.set_seed(0)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256,
    use_cache=False,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config)
model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0))
model = autopar.parallelize(model, "local", {"input_ids": data[0], "labels": data[0]})  # autopar
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
losses = []
for ids in data:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
