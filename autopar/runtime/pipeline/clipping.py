"""`torch.nn.utils.clip_grad_norm_` of a pipeline's parameters: its norm is that of the gradients on all stages.

torch sees the gradients of one stage, and would scale those of each stage by another factor.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat import add_total_norm
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem
from ..state.gradient_norm import total_norm


class _Stage(NamedTuple):
    """The parameters of one rank of a pipeline, and the names of those that no other stage counts."""

    mesh: MeshHandle
    parameters: Mapping[str, nn.Parameter]
    counted: frozenset[str]


_STAGES: weakref.WeakKeyDictionary[nn.Module, _Stage] = weakref.WeakKeyDictionary()


def watch_clipping(
    parallel: nn.Module, mesh: MeshHandle, parameters: Mapping[str, nn.Parameter], holders: Mapping[str, Sequence[int]]
) -> None:
    """From now on torch's clipping counts the gradients of all stages. `holders`: the stages that have each parameter."""
    counted = frozenset(name for name in parameters if holders[name][0] == mesh.pp.coordinate)
    _STAGES[parallel] = _Stage(mesh, parameters, counted)
    add_total_norm(_norm_over_stages)


def _norm_over_stages(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor | None:
    """None where these are gradients of no pipeline. All ranks come here together; a stage without gradients comes with none."""
    given = {id(gradient) for gradient in gradients}
    for stage in list(_STAGES.values()):
        own = {name: p.grad for name, p in stage.parameters.items() if p.grad is not None}
        mine = {name: gradient for name, gradient in own.items() if id(gradient) in given}
        if not mine and (gradients or own):
            continue
        if len(mine) < len(given):
            raise RuntimeProblem(
                "clip_grad_norm_ of the gradients of a pipeline together with others: clip each model's gradients by themselves"
            )
        counted = [each for name, each in mine.items() if name in stage.counted and isinstance(each, DTensor)]
        return total_norm(counted, stage.mesh, norm_type)
    return None
