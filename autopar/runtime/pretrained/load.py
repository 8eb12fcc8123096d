"""`parallel.load_pretrained`: weights from files of the Hub's layout into the shards of a parallel model, in place."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.modules.module import _IncompatibleKeys

from ..checkpoint.held import local_tensor
from ..checkpoint.rounds import Rounds, attempt
from ..errors import CheckpointProblem
from ..plain.plain_model import PlainModel
from ..state.layout import model_shard, zero_shard
from ..state.materialize import State
from .conversions import transforms_of
from .weight_files import PretrainedWeights, misfit, open_weights

LOGGER = logging.getLogger("autopar")
_OTHER = "name the folder of this model's weights, or "


def load_pretrained(
    state: State, plain: PlainModel | None, rounds: Rounds, path: str | os.PathLike[str], *, strict: bool
) -> _IncompatibleKeys:
    """Copies this rank's part of each weight. All ranks call it together; CheckpointProblem on all of them before anything is
    changed. Without `strict` weights may be missing, unexpected, or rounded to a shorter type."""
    transforms = transforms_of(plain.skeleton) if plain is not None else []
    weights = open_weights(Path(path).absolute(), rounds, saved_names(state, plain), body_prefix(plain), transforms)
    kinds = {name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in state.index.specs.items()}
    others = plain.unused if plain is not None else {}
    kinds |= {name: (tuple(each.shape), each.dtype) for name, each in others.items()}
    for name, weight in weights.found.items():
        if said := misfit(name, weight, *kinds[name], narrowing=not strict):
            raise CheckpointProblem(said)
    missing, unexpected = unfit(weights, saved_names(state, plain)), [name for name in weights.unexpected if name not in kinds]
    if strict and (missing or unexpected):
        raise CheckpointProblem(said_unfit(weights, missing, unexpected, _OTHER + "pass strict=False to leave them as they are"))
    if (missing or unexpected) and rounds.rank == 0:
        LOGGER.warning("%s", said_unfit(weights, missing, unexpected, "they stay as they are"))
    rounds.raise_together(attempt(lambda: _fill(state, others, weights)))
    return _IncompatibleKeys(missing, unexpected)


def _fill(state: State, others: Mapping[str, torch.Tensor], weights: PretrainedWeights) -> None:
    with torch.no_grad():
        for name, parameter in state.parameters.items():
            if name in weights:
                shard = model_shard(weights[name], state.specs[name].placements, state.mesh)
                local_tensor(parameter).copy_(zero_shard(shard, state.zero_dims[name], state.mesh))
        for name, tensor in {**state.buffers, **others}.items():
            if name in weights:
                tensor.copy_(weights[name])


def saved_names(state: State, plain: PlainModel | None) -> dict[str, str]:
    """Each key of the model's state dict with the first name of that tensor. An exported program knows first names only."""
    if plain is not None:
        return plain.names
    return {name: name for name, spec in state.index.specs.items() if not spec.buffer or spec.persistent}


def body_prefix(plain: PlainModel | None) -> str:
    """Of a model of transformers the name of its body."""
    found = getattr(plain.skeleton, "base_model_prefix", "") if plain is not None else ""
    return found if isinstance(found, str) else ""


def unfit(weights: PretrainedWeights, names: Mapping[str, str]) -> list[str]:
    """First names of the model that no file has."""
    return [name for name in dict.fromkeys(names.values()) if name not in weights]


def said_unfit(weights: PretrainedWeights, missing: list[str], unexpected: list[str], remedy: str) -> str:
    """One line on names that do not fit."""
    parts = []
    for names, what in ((missing, "has no"), (unexpected, "has, which the model has not,")):
        if names:
            parts.append(f"{what} {names[0][:200]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    return f"{weights.files.folder} {', and '.join(parts)}: {remedy}"
