"""trl's SFTTrainer with LoRA of peft on a Llama, on examples of different lengths."""

import inspect
import json
import tempfile

import peft
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

from autopar.integrations.trl import SFTTrainer  # autopar

# before: from trl import SFTTrainer

words = {chr(code): code for code in range(128)} | {"<eos>": 128}
characters = Tokenizer(models.WordLevel(words, unk_token="?"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<eos>")
text = inspect.getsource(json).encode()
data = Dataset.from_list([{"input_ids": list(text[at : at + 8 + at % 7])} for at in range(0, 384, 16)])
transformers.set_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=129,
))  # fmt: skip
args = SFTConfig(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=3, learning_rate=1e-2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, bf16=False,
)  # fmt: skip
trainer = SFTTrainer(
    cluster="local",  # autopar
    model=model,
    args=args,
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
)
trainer.train()
model = trainer.model
losses = [each[key] for each in trainer.state.log_history for key in ("loss", "grad_norm", "entropy") if key in each]
print(losses)
