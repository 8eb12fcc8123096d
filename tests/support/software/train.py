"""Trains a small Llama as a file that was written says, on gloo processes, and prints the peak of tensors of rank 0 in its second
step: ``torchrun ... train.py deepspeed ds_config.json config.json 256 2`` (tokens of a sequence, and sequences of a micro-batch
where the file leaves them to the script); ``transformers`` and ``accelerate`` (which its own launcher starts) likewise."""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Bytes of live storages, and their peak: of a DTensor its shard's, of a storage that FSDP2 frees by resizing what is left.
    Tensors on meta, which DeepSpeed keeps of all parameters for their shapes, have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Measures the peak from now on."""
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a wrapper's storage has the global size and no memory; its shards' operations come next
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._live[int(storage._cdata)] = weakref.ref(storage)
        sizes = {key: storage.nbytes() for key, each in self._live.items() if (storage := each()) is not None}
        self._live = {key: self._live[key] for key in sizes}
        self.peak = max(self.peak, sum(sizes.values()))
        return result


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens that are their own labels."""

    def __init__(self, vocabulary: int, seq: int, size: int) -> None:
        self.ids = torch.randint(vocabulary, (size, seq))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def deepspeed(path: str, config: Any, seq: int, _: int, live: TensorBytes) -> None:
    import deepspeed

    settings = json.loads(Path(path).read_text())
    with live:
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=settings
        )  # fmt: skip
        for _ in range(2):
            live.reset_peak()
            for _ in range(settings["gradient_accumulation_steps"]):
                ids = torch.randint(config.vocab_size, (settings["train_micro_batch_size_per_gpu"], seq))
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()


def trainer(path: str, config: Any, seq: int, _: int, live: TensorBytes) -> None:
    class TwoSteps(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            live.reset_peak()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    (settings,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(path)
    size = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * settings.world_size
    data = Tokens(config.vocab_size, seq, 2 * size)
    with live:
        model = transformers.AutoModelForCausalLM.from_config(config)
        transformers.Trainer(model, settings, train_dataset=data, callbacks=[TwoSteps()]).train()


def accelerate(path: str, config: Any, seq: int, micro: int, live: TensorBytes) -> None:
    """The file is what `accelerate launch` was started with; micro-batches are of `micro` sequences."""
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    def on_processes(_: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> tuple[str, Any]:
        return "gloo", DistributedType.MULTI_GPU

    # accelerate has FSDP2 for kinds with devices alone (state.py): what decides on the kind is all that is changed for a CPU
    PartialState._prepare_backend = on_processes  # type: ignore[method-assign]
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))  # type: ignore[method-assign]
    with live:
        accelerator = Accelerator()
        model = transformers.AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loader = torch.utils.data.DataLoader(Tokens(config.vocab_size, seq, 2 * micro * accelerator.num_processes), micro)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            live.reset_peak()
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    train: dict[str, Callable[..., None]] = {"deepspeed": deepspeed, "transformers": trainer, "accelerate": accelerate}
    name, path, sizes_path, seq, micro = sys.argv[1:]
    sizes = json.loads(Path(sizes_path).read_text())
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    config.use_cache = False
    live = TensorBytes()
    train[name](path, config, int(seq), int(micro), live)
    if dist.get_rank() == 0:
        print(f"peak {live.peak}", flush=True)


if __name__ == "__main__":
    main()
