"""Adapters of peft: of a PeftModel only what peft saves is gathered, written as peft writes it, and read again under any plan."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoint.rounds import Rounds
from ..errors import StateError
from ..plain.plain_model import PlainModel
from ..state.model_state import State


def is_adapted(model: object) -> bool:
    """Return whether this is a PeftModel: adapters that transformers itself has added are saved as it saves them."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def adapter_state(state: State, plain: PlainModel) -> dict[str, torch.Tensor]:
    """Return the full tensors that peft saves of the adapters, and the others, which it leaves out, without values (all ranks
    must call)."""
    skeleton: Any = plain.skeleton
    tensors: dict[str, torch.Tensor] = skeleton.state_dict()
    saved: set[str] = set()
    for adapter in skeleton.peft_config:
        names, computed = _names_by_key(skeleton, adapter)
        saved |= set(tensors) if computed else set(names.values())
    for key in sorted(saved):
        name = plain.names.get(key, key)
        tensors[key] = state.broadcast_full(name) if name in state.index.specs else plain.unused[name]
    return tensors


def save_adapters(state: State, plain: PlainModel, rounds: Rounds, folder: str | os.PathLike[str]) -> Path:
    """Write the adapters and their configuration as ``PeftModel.save_pretrained`` does, on one rank (all ranks must call)."""
    tensors, skeleton = adapter_state(state, plain), plain.skeleton
    rounds.on_first(lambda: skeleton.save_pretrained(str(folder), state_dict=tensors))  # type: ignore[operator]
    return Path(folder).absolute()


def holds_adapters(folder: str | os.PathLike[str], model: object) -> bool:
    """Return whether this is a folder of peft for the adapters of a PeftModel, and no folder of weights."""
    return is_adapted(model) and all(Path(each, "adapter_config.json").is_file() for each in _folders(folder, model).values())


def read_adapters(folder: str | os.PathLike[str], skeleton: nn.Module) -> dict[str, torch.Tensor]:
    """Return what ``PeftModel.save_pretrained`` has written, by the names of the PeftModel `skeleton`. StateError where the files
    are of other adapters."""
    every = (_adapter_weights(path, skeleton, adapter) for adapter, path in _folders(folder, skeleton).items())
    return {name: tensor for weights in every for name, tensor in weights.items()}


def _folders(folder: str | os.PathLike[str], model: Any) -> dict[str, Path]:
    """The folder of each adapter: peft writes that of the name ``default`` without one of its own."""
    return {adapter: Path(folder) if adapter == "default" else Path(folder, adapter) for adapter in model.peft_config}


def _adapter_weights(folder: Path, skeleton: nn.Module, adapter: str) -> Mapping[str, torch.Tensor]:
    """The weights of one adapter's file under the plain model's names."""
    names, computed = _names_by_key(skeleton, adapter)
    if computed:
        raise StateError(f"peft computes {computed} when it saves this kind of adapter: load the folder into the plain model")
    weights = _peft().load_peft_weights(str(folder), device="cpu")
    if different := sorted(weights.keys() ^ names.keys()):
        what = "misses" if different[0] in names else "has"
        raise StateError(f"the adapter in {folder} {what} {different[0]}, unlike this model's: resume from one of this model")
    return {name: weights[key] for key, name in names.items()}


def _names_by_key(skeleton: nn.Module, adapter: str) -> tuple[dict[str, str], str]:
    """The plain model's name of each tensor that peft saves of an adapter, by its key in the file, and a key whose tensor peft
    computes, or nothing: peft leaves the adapter's name out, each of its methods in its own way, so it is asked with tensors that
    are told apart by identity."""
    tensors = skeleton.state_dict()
    names = {id(tensor): name for name, tensor in tensors.items()}
    saved = _peft().get_peft_model_state_dict(skeleton, state_dict=tensors, adapter_name=adapter)
    computed = next((key for key, tensor in saved.items() if id(tensor) not in names), "")
    return {key: names[id(tensor)] for key, tensor in saved.items() if id(tensor) in names}, computed


def _peft() -> Any:
    """The package of a PeftModel, which has imported it."""
    return importlib.import_module("peft")
