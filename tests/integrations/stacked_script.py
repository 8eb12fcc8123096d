"""A model of transformers with experts, from the meta device: what is loaded from a folder of the Hub's layout, how many bytes of
the experts' weights a rank maps for it, and what is loaded from the folder that it writes."""

import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import autopar
from autopar.integrations.one_device import load_weights
from autopar.runtime.pretrained import stacked
from autopar.runtime.pretrained.weight_files import list_files

read, written, kind, force = sys.argv[1:5]
files = list_files(Path(read))
experts = {(weight.file, weight.start) for name, weight in files.weights.items() if ".experts." in name}
mapped_bytes, plain = [0], stacked.mapped


def counted(path: Path, weight: Any) -> torch.Tensor:
    mapped_bytes[0] += weight.size if (weight.file, weight.start) in experts else 0
    return plain(path, weight)


stacked.mapped = counted
with torch.device("meta"):
    model = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(read))
ids = torch.arange(64).reshape(4, 16)
parallel = autopar.parallelize(model.train(), "local:2", {"input_ids": ids, "labels": ids}, force=force, state=read)
result: dict[str, Any] = {"mapped": mapped_bytes[0], "loaded": parallel.full_state()}
parallel.save_pretrained(written, max_shard_size="20KB")


def forget() -> None:
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()


forget()
found = parallel.load_pretrained(written)
assert not found.missing_keys and not found.unexpected_keys
result["loaded_again"] = parallel.full_state()
forget()
load_weights(read, parallel)  # as the Trainer does with what transformers has written of the whole state
result["resumed"] = parallel.full_state()
torch.save(result, f"{written}.{torch.distributed.get_rank()}.pt")
