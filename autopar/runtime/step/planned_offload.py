"""Optimizer offload that the plan asks for (`Program.offload_optimizer`): every torch optimizer of the program's parameters
keeps its state in host memory, without a call of the user's. A hook before the first step of an optimizer finds it; from then on
a hook of its own runs the update by parts (`host_optimizer`), and the step itself has no parameters left."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..device.offload import HostMemory
from ..errors import RuntimeProblem
from ..state.host_optimizer import OFFLOADED, OffloadedStep, offloaded_step

Replaced = tuple[tuple[Any, ...], dict[str, Any]]


def check_planned_offload(where: str) -> None:
    """RuntimeProblem for a plan that keeps optimizer state on NVMe."""
    if where not in ("", "cpu"):
        raise RuntimeProblem(
            f"the plan keeps the optimizer's state on {where[:40]}, which is priced only: plan with offload_optimizer=cpu, "
            "or take more devices"
        )


def offload_as_planned(
    owner: nn.Module, parameters: Iterable[torch.Tensor], device: torch.device, host: HostMemory, where: str
) -> None:
    """Optimizers of `parameters` are offloaded at their first step, for as long as `owner` lives."""
    if where:
        planned = _PlannedOffload(parameters, device, host)
        handle = register_optimizer_step_pre_hook(planned.before_step)
        weakref.finalize(owner, handle.remove)


class _PlannedOffload:
    def __init__(self, parameters: Iterable[torch.Tensor], device: torch.device, host: HostMemory) -> None:
        self.parameters = {id(each) for each in parameters}
        self.device, self.host = device, host
        self.known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The hook of all optimizers."""
        if optimizer in self.known:
            return
        self.known.add(optimizer)
        mine = any(id(each) in self.parameters for group in optimizer.param_groups for each in group["params"])
        if mine and OFFLOADED not in optimizer.__dict__:
            step = offloaded_step(optimizer, self.host, self.device)
            optimizer.register_step_pre_hook(_update_hook(step))


def _update_hook(step: OffloadedStep) -> Callable[[Optimizer, Any, Any], Replaced]:
    """The hook of one offloaded optimizer: the update, in place of the step's own."""

    def update(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Replaced:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step.run(optimizer)
        given = {} if closure is None else {"closure": lambda: loss}
        return (_without_parameters(optimizer),), given

    return update


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """What the optimizer's own step runs on after the update."""
    empty: Optimizer = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = []
    return empty
