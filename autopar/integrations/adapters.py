"""Adapters of peft: a parallel model's, saved and loaded as peft saves those of the plain model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import StateError
from autopar.runtime.parallel import Parallel


def is_adapted(model: object) -> bool:
    """Return whether this is a PeftModel: adapters that transformers itself has added are saved as it saves them."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_model(model: Any) -> nn.Module:
    """The model inside peft's, or the model itself."""
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[no-any-return]


def load_adapters(folder: str, skeleton: Any, parallel: Parallel) -> None:
    """Copies what ``PeftModel.save_pretrained`` has written into the parallel model; `skeleton` is the PeftModel without values
    (all ranks must call). StateError where the files are of other adapters."""
    loaded: dict[str, torch.Tensor] = {}
    for adapter in skeleton.peft_config:
        path = Path(folder) if adapter == "default" else Path(folder, adapter)
        loaded |= dict(_adapter_weights(path, skeleton, adapter))
    parallel.load_full_state(lambda name: loaded[name] if name in loaded else parallel.state.broadcast_full(name))


def _adapter_weights(folder: Path, skeleton: nn.Module, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of one adapter's file under the plain model's names."""
    from peft.utils import load_peft_weights

    weights, names = load_peft_weights(str(folder), device="cpu"), _names_by_key(skeleton, adapter)
    if different := sorted(weights.keys() ^ names.keys()):
        what = "misses" if different[0] in names else "has"
        raise StateError(f"the adapter in {folder} {what} {different[0]}, unlike this model's: resume from one of this model")
    for key, name in names.items():
        yield name, weights[key]


def _names_by_key(skeleton: nn.Module, adapter: str) -> dict[str, str]:
    """The plain model's name of each tensor that peft saves of an adapter, by its key in the file: peft leaves the adapter's name
    out, each of its methods in its own way, so it is asked with tensors that are told apart by identity."""
    from peft import get_peft_model_state_dict

    tensors = skeleton.state_dict()
    names = {id(tensor): name for name, tensor in tensors.items()}
    saved = get_peft_model_state_dict(skeleton, state_dict=tensors, adapter_name=adapter)
    if computed := [key for key, tensor in saved.items() if id(tensor) not in names]:
        raise StateError(f"peft computes {computed[0]} when it saves this kind of adapter: load the folder into the plain model")
    return {key: names[id(tensor)] for key, tensor in saved.items()}
