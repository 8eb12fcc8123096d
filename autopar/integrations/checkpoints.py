"""Checkpoints of a framework's run: weights as the plain model has them, adapters as peft saves those of the plain model, and
optimizer state by parameter name for any plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from autopar.errors import StateError
from autopar.integrations.one_device import wait_for_all
from autopar.runtime.parallel import Parallel

OPTIMIZER_FOLDER = "optimizer"

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """Save the optimizer's state, of which each rank writes its shards (all ranks must call)."""
    with _without_empty_groups(optimizer):
        state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    save({"optimizer": state}, checkpoint_id=str(Path(folder, OPTIMIZER_FOLDER)))
    wait_for_all()


def load_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """Load what a run under this plan or another one wrote (all ranks must call)."""
    path = Path(folder, OPTIMIZER_FOLDER)
    if not path.is_dir():
        raise StateError(f"{folder} has no folder {OPTIMIZER_FOLDER}, so it was not saved by autopar: pass its model only")
    with _without_empty_groups(optimizer):
        state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
        load({"optimizer": state}, checkpoint_id=str(path))
        set_optimizer_state_dict(parallel, optimizer, optim_state_dict=state, options=_FLAT)


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """The optimizer without groups that have no parameters: torch 2.13 finds a group by its first parameter, and a Trainer makes
    a group of biases and norms also for LoRA, which trains none."""
    empty = [(place, group) for place, group in enumerate(optimizer.param_groups) if not group["params"]]
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        yield
    finally:
        for place, group in empty:
            optimizer.param_groups.insert(place, group)


def load_weights(folder: str, parallel: Parallel) -> None:
    """Load what transformers has written into the parallel model (all ranks must call). StateError where weights are missing; of
    tied names one is enough."""
    result = parallel.load_pretrained(folder, strict=False)
    extra = parallel.plain.extra if parallel.plain is not None else {}
    unexpected = [key for key in result.unexpected_keys if key not in extra]
    if result.missing_keys or unexpected:
        what = f"misses {result.missing_keys[0]}" if result.missing_keys else f"has {unexpected[0]}, which the model has not"
        raise StateError(f"the checkpoint {folder} {what}: resume from one of this model")


# -- adapters


def is_adapted(model: object) -> bool:
    """Return whether this is a PeftModel: adapters that transformers itself has added are saved as it saves them."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_model(model: Any) -> nn.Module:
    """The model inside peft's, or the model itself."""
    return model.get_base_model() if is_adapted(model) else model  # type: ignore[no-any-return]


def load_adapters(folder: str, skeleton: Any, parallel: Parallel) -> None:
    """Copy what ``PeftModel.save_pretrained`` has written into the parallel model; `skeleton` is the PeftModel without values
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
