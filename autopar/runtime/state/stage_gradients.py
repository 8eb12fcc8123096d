"""The stage of a pipeline whose parameters or gradients tensors are, or are computed of: what is combined of several of them is
that of all stages, or refused.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.heartbeat import Heartbeat, watched
from ..comm.norms import extremes_over_ranks, norm_over_ranks
from ..compat.dtensor import local_of
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem

PARAMETER = "parameter "
"""Begins the name under which `StageNorms` has the norm of a parameter, not of its gradient. That of what is computed of them has
no name."""
_STAGES: weakref.WeakSet[StageGradients] = weakref.WeakSet()
_ORIGINS = WeakIdKeyDictionary()
"""What DTensors were computed of, where they are no parameters and no gradients themselves, and ordinary numbers that were added
up of such."""
_NORM_OF_ALL = "the norm of all gradients (where a stage has none since a freeze: parallel.clip_grad_norm_(max_norm))"


class StageGradients:
    """The gradients of one stage of a pipeline. `holders`: the stages that have each parameter. `every_stage_trains`: all of
    them have parameters that train. `parameters`: those of this stage."""

    def __init__(self, mesh: MeshHandle, holders: Mapping[str, tuple[int, ...]], every_stage_trains: bool) -> None:
        self.mesh, self.holders, self.every_stage_trains = mesh, holders, every_stage_trains
        self.parameters: weakref.WeakValueDictionary[str, nn.Parameter] = weakref.WeakValueDictionary()
        self.heartbeat: Heartbeat | None = None
        _STAGES.add(self)

    def __deepcopy__(self, _: Any) -> StageGradients:
        """Itself: a copy of a parameter or of its gradient is one of the same stage."""
        return self

    def __reduce__(self) -> Any:
        """Nothing: in a file a parameter is of no stage (``torch.save(parallel.state_dict())``)."""
        return type(None), ()

    def name_of(self, value: DTensor) -> str:
        """The parameter that `value` is, or has the data of, or is the gradient of; empty where it is none."""
        stage, name = place_of(value)
        if stage is self:
            return name
        start = local_of(value).data_ptr() if local_of(value).numel() else -1
        for name, parameter in self.parameters.items():
            for each in (parameter, parameter.grad):
                if isinstance(each, DTensor) and local_of(each).data_ptr() == start:
                    return name
        return ""

    def shared_like(self, value: torch.Tensor) -> str:
        """A parameter of this shape that several stages have; empty where there is none."""
        shared = (name for name, p in self.parameters.items() if len(self.holders[name]) > 1 and p.shape == value.shape)
        return next(shared, "")

    def total_norm(self, norms: torch.Tensor, names: tuple[str, ...], order: float) -> torch.Tensor:
        """The norm of the norms of all gradients of all stages, those of parameters on several stages counted once."""
        of_parameters = sorted(names) == sorted(f"{PARAMETER}{name}" for name in self.parameters)
        if not of_parameters and not self.every_stage_trains:
            raise RuntimeProblem(
                "a stage of this pipeline has no parameters that train, so that its ranks take no part in torch's norm of all "
                "gradients: call parallel.clip_grad_norm_(max_norm)"
            )
        if not of_parameters and sorted(names) != sorted(name for name, p in self.parameters.items() if p.grad is not None):
            some = "what is computed" if "" in names else "some"
            raise RuntimeProblem(
                f"the norm of {some} of the gradients or parameters of a pipeline, of which a stage has only its own: take that "
                "of all of parallel.parameters(), or of their gradients as they are, or call parallel.clip_grad_norm_(max_norm)"
            )
        names = tuple(name.removeprefix(PARAMETER) for name in names)
        first = torch.tensor([self.holders[name][0] == self.mesh.pp.coordinate for name in names], device=norms.device)
        own = torch.linalg.vector_norm(torch.where(first, norms.double(), 0.0 if order >= 0 else math.inf), order)
        return self.over_stages(own, order).to(norms.dtype)

    def over_stages(self, number: torch.Tensor, order: float) -> torch.Tensor:
        """The norm of the norms of all stages; of order 1 the sum of any numbers."""
        with watched(self.heartbeat, _NORM_OF_ALL):
            return norm_over_ranks(number.double(), order, self.mesh.group(self.mesh.pp.name)).to(number.dtype)

    def extreme_over_stages(self, number: torch.Tensor, largest: bool) -> torch.Tensor:
        """The largest of the numbers of all stages, or the smallest."""
        with watched(self.heartbeat, _NORM_OF_ALL):
            return extremes_over_ranks(number.double(), largest, self.mesh.group(self.mesh.pp.name)).to(number.dtype)

    def has_all(self, names: set[str]) -> bool:
        """Return whether these are all parameters of this stage, or all that have gradients. Not of a stage with one parameter,
        of which a number would not be known for one of all."""
        held = Counter(stage for name, stages in self.holders.items() for stage in stages)
        with_gradients = {name for name, p in self.parameters.items() if p.grad is not None}
        every = names == set(self.parameters) or (names == with_gradients and self.every_stage_trains)
        return every and min(held[stage] for stage in range(self.mesh.pp.size)) > 1


def place_of(parameter: torch.Tensor) -> tuple[StageGradients | None, str]:
    """The stage and the name of a canonical parameter or of its gradient; (None, "") of any other tensor."""
    named = parameter.__dict__
    if "parameter_name" in named:  # a `Gradient`
        return named["stage"], named["parameter_name"]
    place: tuple[StageGradients | None, str] = named.get("autopar_place", (None, ""))
    return place


Origins = frozenset[tuple[StageGradients | None, str]]


def origins_of(value: Any) -> Origins:
    """Return the parameters of stages that a tensor was computed of, or of their gradients."""
    if not isinstance(value, DTensor):
        return frozenset()
    stage, name = place_of(value)
    return frozenset(((stage, name),)) if stage is not None and name else _ORIGINS.get(value, frozenset())


def note_origins(value: DTensor, origins: Origins) -> None:
    """Say what a tensor was computed of; a parameter or gradient that was written into stays what it is."""
    if origins and place_of(value)[0] is None and _ORIGINS.get(value) != origins:
        _ORIGINS[value] = origins


def origins_in_sum(total: torch.Tensor, origins: Origins, adds: bool = True) -> Origins:
    """Return the parameters of which an ordinary tensor has numbers, once one of `origins` is added, or else put in its place."""
    every: Origins = origins | (_ORIGINS.get(total, frozenset()) if adds else frozenset())
    _ORIGINS[total] = every
    return every


def is_of_several(origins: Origins) -> bool:
    """Return whether several are parameters of one stage (one of each of two models is a pair)."""
    return len(origins) > 1 and len({stage for stage, _ in origins}) < len(origins)


def stages_of(value: DTensor | None = None) -> list[StageGradients]:
    """Return the stages of pipelines of this process, those on whose mesh `value` is."""
    return [stage for stage in _STAGES if value is None or stage.mesh.state_mesh == value.device_mesh]


def combined(word: str) -> RuntimeProblem:
    """The error for what needs the parameters or gradients of all stages of a pipeline."""
    return RuntimeProblem(
        f"{word} combines several parameters or gradients, of which a stage of a pipeline has only its own: compute it of "
        'parallel.full_state() or parallel.full_gradients(), which all ranks call, or plan without a pipeline (force="pp=1"); '
        "their norm is parallel.clip_grad_norm_(max_norm)"
    )
