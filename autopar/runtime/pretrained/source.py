"""``parallelize(state=folder)``: the weights of a folder for a model that may be on the meta device. Each rank reads its own
part."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..checkpoint.rounds import Failed, Rounds, attempt
from ..errors import CheckpointProblem
from ..state.meta_buffers import fill_missing
from ..state.weight_source import named_tensors
from .conversions import transforms_of
from .load import said_unfit, unfit
from .weight_files import misfit, open_weights

LOGGER = logging.getLogger("autopar")


def pretrained_source(model: nn.Module, path: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Full tensors by the first names of the model's. All ranks call it together.

    What no state dict has (buffers that are not persistent) comes from rank 0: its model's, or what their module computes where
    that is on the meta device. CheckpointProblem on all ranks where a weight is missing or of another shape or kind. Weights that
    the model has not, and those that are rounded to the model's dtype, are warned of, as `from_pretrained` does."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake"
    rounds = Rounds(None if alone else dist.group.WORLD, lambda rank: f"rank {rank}")
    own = named_tensors(model)
    first: dict[int, str] = {}
    for name, tensor in own.items():
        first.setdefault(id(tensor), name)
    saved = {id(each) for each in model.state_dict(keep_vars=True).values() if isinstance(each, torch.Tensor)}
    names = {name: first[id(tensor)] for name, tensor in own.items() if id(tensor) in saved}
    prefix = getattr(model, "base_model_prefix", "")
    body = prefix if isinstance(prefix, str) else ""
    weights = open_weights(Path(path).absolute(), rounds, names, body, transforms_of(model))
    rounded = []
    for name, weight in weights.found.items():
        if said := misfit(name, weight, own[name].shape, own[name].dtype, narrowing=True):
            raise CheckpointProblem(said)
        if misfit(name, weight, own[name].shape, own[name].dtype, narrowing=False):
            rounded.append(name)
    missing, unexpected = unfit(weights, names), [name for name in weights.unexpected if name not in own]
    if missing:
        raise CheckpointProblem(
            said_unfit(
                weights,
                missing,
                unexpected,
                "name the folder of this model's weights, or build the model with values, without state=, and call "
                "parallel.load_pretrained(folder, strict=False)",
            )
        )
    if unexpected and rounds.rank == 0:
        LOGGER.warning("%s", said_unfit(weights, [], unexpected, "they are not loaded"))
    if rounded and rounds.rank == 0:
        LOGGER.warning(
            "%s (%d weights) is rounded to the model's %s: build the model in %s to keep all digits", rounded[0], len(rounded),
            str(own[rounded[0]].dtype).removeprefix("torch."), str(weights.found[rounded[0]].dtype).removeprefix("torch."),
        )  # fmt: skip

    def computed() -> dict[str, torch.Tensor]:
        tensors = {name: each for name, each in own.items() if id(each) not in saved}
        fill_missing(model, tensors)
        return {name: each.detach().to("cpu") for name, each in tensors.items()}

    others = rounds.broadcast(attempt(computed) if rounds.rank == 0 else None)
    if isinstance(others, Failed):
        raise CheckpointProblem(others.text)
    return ChainMap(others, weights)  # type: ignore[arg-type]
