"""Weights from files of the Hub's layout: `parallel.load_pretrained` puts them into the shards of a parallel model, in place;
``parallelize(state=folder)`` fills a model that may be on the meta device. Each rank reads its own part."""

from __future__ import annotations

import logging
import os
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ..checkpoint.rounds import Rounds
from ..compat.dtensor import local_of
from ..device.groups import several_ranks
from ..errors import CheckpointProblem
from ..plain.plain_model import PlainModel, first_names
from ..state.model_state import State
from ..state.weight_source import Weight, fill_missing, named_tensors, whole_weight
from .weight_files import PretrainedWeights, misfit, open_weights

LOGGER = logging.getLogger("autopar")
_OTHER = "name the folder of this model's weights, or "


def load_pretrained(
    state: State, plain: PlainModel | None, rounds: Rounds, path: str | os.PathLike[str], *, strict: bool
) -> _IncompatibleKeys:
    """Copy this rank's part of each weight. All ranks call it together; CheckpointProblem on all of them before anything is
    changed. Without `strict` weights may be missing, unexpected, or rounded to a shorter type."""
    names = saved_names(state, plain)
    weights = open_weights(Path(path).absolute(), rounds, names, plain.skeleton if plain is not None else None)
    kinds = {name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in state.index.specs.items()}
    others = plain.unused if plain is not None else {}
    kinds |= {name: (tuple(each.shape), each.dtype) for name, each in others.items()}
    for name, weight in weights.places.items():
        if problem := misfit(name, weight, *kinds[name], narrowing=not strict):
            raise CheckpointProblem(problem)
    missing, unexpected = unfit(weights, names), [name for name in weights.unexpected if name not in kinds]
    if strict and (missing or unexpected):
        remedy = _OTHER + "pass strict=False to leave them as they are"
        raise CheckpointProblem(unfit_message(weights, missing, unexpected, remedy))
    if (missing or unexpected) and rounds.rank == 0:
        LOGGER.warning("%s", unfit_message(weights, missing, unexpected, "they stay as they are"))
    with rounds.together():
        _fill(state, others, weights)
    return _IncompatibleKeys(missing, unexpected)


def _fill(state: State, others: Mapping[str, torch.Tensor], weights: PretrainedWeights) -> None:
    with torch.no_grad():
        for name, parameter in state.parameters.items():
            if name in weights:
                local_of(parameter).copy_(state.local_part(name, weights[name]))
        for name, tensor in {**state.buffers, **others}.items():
            if name in weights:
                tensor.copy_(whole_weight(weights[name]))


def saved_names(state: State, plain: PlainModel | None) -> dict[str, str]:
    """Return each key of the model's state dict with the first name of that tensor: parameters, then buffers."""
    if plain is not None:
        return plain.names
    specs = state.index.specs
    names = [name for name, spec in specs.items() if not spec.buffer]
    names += [name for name, spec in specs.items() if spec.buffer and spec.persistent]
    return {**{name: name for name in names}, **{key: name for key, name in state.tied.items() if name in names}}


def unfit(weights: PretrainedWeights, names: Mapping[str, str]) -> list[str]:
    """First names of the model that no file has."""
    return [name for name in dict.fromkeys(names.values()) if name not in weights]


def unfit_message(weights: PretrainedWeights, missing: list[str], unexpected: list[str], remedy: str) -> str:
    """Return one line on names that do not fit."""
    parts = []
    for names, what in ((missing, "has no"), (unexpected, "has, which the model has not,")):
        if names:
            parts.append(f"{what} {names[0][:200]}" + (f" and {len(names) - 1} more" if len(names) > 1 else ""))
    return f"{weights.files.folder} {', and '.join(parts)}: {remedy}"


def pretrained_source(model: nn.Module, path: str | os.PathLike[str]) -> Mapping[str, Weight]:
    """Full tensors by the first names of the model's. All ranks call it together.

    What no state dict has (buffers that are not persistent) comes from rank 0: its model's, or what their module computes where
    that is on the meta device. CheckpointProblem on all ranks where a weight is missing or of another shape or kind. Weights that
    the model has not, and those that are rounded to the model's dtype, are warned of, as `from_pretrained` does."""
    rounds = Rounds(dist.group.WORLD if several_ranks() else None, lambda rank: f"rank {rank}")
    own = named_tensors(model)
    names, _ = first_names(model)
    weights = open_weights(Path(path).absolute(), rounds, names, model)
    rounded = []
    for name, weight in weights.places.items():
        if problem := misfit(name, weight, own[name].shape, own[name].dtype, narrowing=True):
            raise CheckpointProblem(problem)
        if misfit(name, weight, own[name].shape, own[name].dtype, narrowing=False):
            rounded.append(name)
    missing, unexpected = unfit(weights, names), [name for name in weights.unexpected if name not in own]
    if missing:
        raise CheckpointProblem(
            unfit_message(
                weights,
                missing,
                unexpected,
                "name the folder of this model's weights, or build the model with values, without state=, and call "
                "parallel.load_pretrained(folder, strict=False)",
            )
        )
    if unexpected and rounds.rank == 0:
        LOGGER.warning("%s", unfit_message(weights, [], unexpected, "they are not loaded"))
    if rounded and rounds.rank == 0:
        LOGGER.warning(
            "%s (%d weights) is rounded to the model's %s: build the model in %s to keep all digits", rounded[0], len(rounded),
            str(own[rounded[0]].dtype).removeprefix("torch."), str(weights.places[rounded[0]].dtype).removeprefix("torch."),
        )  # fmt: skip

    def computed() -> dict[str, torch.Tensor]:
        saved = {id(own[name]) for name in names.values()}
        tensors = {name: each for name, each in own.items() if id(each) not in saved}
        fill_missing(model, tensors)
        return {name: each.detach().to("cpu") for name, each in tensors.items()}

    return ChainMap(rounds.on_first(computed), weights)  # type: ignore[arg-type]
