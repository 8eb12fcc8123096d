"""Checkpoints of a framework's run: weights as the plain model has them, optimizer state by parameter name for any plan."""

from __future__ import annotations

from pathlib import Path

import torch
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
    """Each rank writes its shards (all ranks must call)."""
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    save({"optimizer": state}, checkpoint_id=str(Path(folder, OPTIMIZER_FOLDER)))
    wait_for_all()


def load_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """What a run under this plan or another one wrote (all ranks must call)."""
    path = Path(folder, OPTIMIZER_FOLDER)
    if not path.is_dir():
        raise StateError(f"{folder} has no folder {OPTIMIZER_FOLDER}, so it was not saved by autopar: pass its model only")
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    load({"optimizer": state}, checkpoint_id=str(path))
    set_optimizer_state_dict(parallel, optimizer, optim_state_dict=state, options=_FLAT)


def read_weights(folder: str) -> dict[str, torch.Tensor]:
    """All weights of a folder that `save_pretrained` wrote, whole or in parts."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        raise StateError(f"{folder} has no model.safetensors: pass a folder that the Trainer has saved")
    out: dict[str, torch.Tensor] = {}
    for file in files:
        out |= load_file(file)
    return out


def load_weights(folder: str, parallel: Parallel) -> None:
    """Into the parallel model (all ranks must call). StateError where weights are missing; of tied names one is enough."""
    state = read_weights(folder)
    result = parallel.load_state_dict(state, strict=False)
    names = parallel.plain.names if parallel.plain is not None else {}
    held = {names.get(key) for key in state}
    missing = [key for key in result.missing_keys if names.get(key) not in held]
    if missing or result.unexpected_keys:
        what = f"misses {missing[0]}" if missing else f"has {result.unexpected_keys[0]}, which the model has not"
        raise StateError(f"the checkpoint {folder} {what}: resume from one of this model")
