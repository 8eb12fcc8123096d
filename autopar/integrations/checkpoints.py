"""Checkpoints of a framework's run: weights as the plain model has them, and optimizer state by parameter name for any plan."""

from __future__ import annotations

from pathlib import Path

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
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    save({"optimizer": state}, checkpoint_id=str(Path(folder, OPTIMIZER_FOLDER)))
    wait_for_all()


def load_optimizer(folder: str, parallel: Parallel, optimizer: Optimizer) -> None:
    """Load what a run under this plan or another one wrote (all ranks must call)."""
    path = Path(folder, OPTIMIZER_FOLDER)
    if not path.is_dir():
        raise StateError(f"{folder} has no folder {OPTIMIZER_FOLDER}, so it was not saved by autopar: pass its model only")
    state = get_optimizer_state_dict(parallel, optimizer, options=_FLAT)
    load({"optimizer": state}, checkpoint_id=str(path))
    set_optimizer_state_dict(parallel, optimizer, optim_state_dict=state, options=_FLAT)


def load_weights(folder: str, parallel: Parallel) -> None:
    """Load what transformers has written into the parallel model (all ranks must call). StateError where weights are missing; of
    tied names one is enough."""
    result = parallel.load_pretrained(folder, strict=False)
    extra = parallel.plain.extra if parallel.plain is not None else {}
    unexpected = [key for key in result.unexpected_keys if key not in extra]
    if result.missing_keys or unexpected:
        what = f"misses {result.missing_keys[0]}" if result.missing_keys else f"has {unexpected[0]}, which the model has not"
        raise StateError(f"the checkpoint {folder} {what}: resume from one of this model")
