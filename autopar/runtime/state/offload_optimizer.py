"""Optimizer offload (`parallel.offload_optimizer`): between steps the state of the optimizer lies in host memory. A step takes
the parameters in parts: the state of a part is copied to the device, updated there by the optimizer's own step, and copied back,
while on CUDA the state of the next part is on its way. The numbers are those of the optimizer without it, bit by bit.

A plan may ask for it too (`Program.offload_optimizer`), without a call of the user's: a hook before the first step of an
optimizer of the program's parameters finds it; from then on a hook of its own runs the update by parts, and the step itself has
no parameters left.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..compat.dtensor import largest_part, local_of, replace_local
from ..compat.hooks import around_optimizer_steps
from ..device.offload import HostMemory
from ..errors import RuntimeProblem

PART_BYTES = 2**28
"""The bytes of the parameters whose state is on the device at the same time; twice as many with what is on its way."""


def offload_optimizer(optimizer: Optimizer, device: torch.device, part_bytes: int | None = None, to: str = "cpu") -> None:
    """Replace the optimizer's step. RuntimeProblem where it is not one of parameter by parameter, or is offloaded already."""
    kind = type(optimizer)
    check_offload_device(to)
    if isinstance(getattr(optimizer.step, "__self__", None), Optimizer) is False or "step" in optimizer.__dict__:
        raise RuntimeProblem(f"the step of this {kind.__name__} was replaced: call offload_optimizer before a scheduler has it")
    offloaded = offloaded_step(optimizer, HostMemory(device), device, part_bytes)
    hooked: Any = Optimizer.profile_hook_step(offloaded.step)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]
    optimizer.__dict__[OFFLOADED] = True


OFFLOADED = "_autopar_offloaded"
"""Marks an optimizer whose state is offloaded by `offload_optimizer`."""


def check_offload_device(to: str, remedy: str = 'pass device="cpu" (host memory)') -> None:
    """Raise a RuntimeProblem for another place than host memory."""
    if to != "cpu":
        raise RuntimeProblem(f"no optimizer is offloaded to {str(to)[:40]}: {remedy}, or take more devices")


def offloaded_step(optimizer: Optimizer, host: HostMemory, device: torch.device, part_bytes: int | None = None) -> OffloadedStep:
    """The step of this optimizer by parts. RuntimeProblem where it is not one of parameter by parameter."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        raise RuntimeProblem(
            f"{kind.__name__} needs its closure, and updates all parameters at once: offload an optimizer that takes them singly"
        )
    inner: Callable[..., Any] = getattr(kind.step, "__wrapped__", kind.step)  # without hooks, which run once a step
    return OffloadedStep(inner, host, device, part_bytes or PART_BYTES)


class OffloadedStep:
    """The step of one optimizer by parts, in the place of its own (`step`), or in a hook before it (`update`)."""

    def __init__(self, inner: Callable[..., Any], host: HostMemory, device: torch.device, part_bytes: int) -> None:
        self.inner, self.host, self.device, self.part_bytes = inner, host, device, part_bytes

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Return the loss of the closure, after the update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._run(optimizer)
        return loss

    def update(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Replaced:
        """Return arguments with which the optimizer's own step does nothing more."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = self.step(optimizer, closure)
        return (_without_parameters(optimizer),), {} if closure is None else {"closure": lambda: loss}

    def _run(self, optimizer: Optimizer) -> None:
        if odd := next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None):  # all parts would share it
            raise RuntimeProblem(f"{type(optimizer).__name__} has state under {odd!r}, of no parameter: do not offload it")
        groups = optimizer.param_groups
        parts = list(self._parts(groups))
        options: list[dict[str, Any] | None] = [None] * len(groups)
        on_way = self._fetch(optimizer, parts[0][1]) if parts else None
        try:
            for number, (index, params) in enumerate(parts):
                arrived, on_way = on_way, None
                self._arrive(arrived or [])
                if number + 1 < len(parts):
                    on_way = self._fetch(optimizer, parts[number + 1][1])
                part = {**groups[index], "params": params}
                optimizer.param_groups = [part]
                self.inner(optimizer)
                self._offload(optimizer, params)
                changed = {key: value for key, value in part.items() if key != "params"}
                options[index] = changed if options[index] is None else options[index]
        finally:
            optimizer.param_groups = groups
        for group, changed_options in zip(groups, options, strict=True):
            group.update(changed_options or {})  # what counts its own steps in a group
        if self.host.stream is not None:
            self.host.stream.synchronize()

    def _parts(self, groups: list[dict[str, Any]]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Parameters with a gradient: those of one group of at most so many bytes. The same on all ranks, which update matrices
        together (`owned_matrices`)."""
        for index, group in enumerate(groups):
            part: list[torch.Tensor] = []
            size = 0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                count = largest_part(parameter) * parameter.element_size()
                if part and size + count > self.part_bytes:
                    yield index, part
                    part, size = [], 0
                part.append(parameter)
                size += count
            if part:
                yield index, part

    def _fetch(self, optimizer: Optimizer, params: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, Any]]:
        """Start the copies of a part's state to the device."""
        out = []
        for _, value in _state(optimizer, params):
            local = local_of(value)
            if local.device.type == "cpu":
                out.append((value, *self.host.copy_to_device(local, self.device)))
        return out

    def _arrive(self, copies: list[tuple[torch.Tensor, torch.Tensor, Any]]) -> None:
        """The state of a part is on the device from here on."""
        for value, on_device, copied in copies:
            if copied is not None:
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                on_device.record_stream(stream)
            replace_local(value, on_device)

    def _offload(self, optimizer: Optimizer, params: list[torch.Tensor]) -> None:
        for _, value in _state(optimizer, params):
            replace_local(value, self.host.copy_to_host(local_of(value)))


def _state(optimizer: Optimizer, params: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """State tensors of more than one element: counters of steps stay where the optimizer has them."""
    for parameter in params:
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                yield key, value


Replaced = tuple[tuple[Any, ...], dict[str, Any]]


def offload_as_planned(
    owner: nn.Module, parameters: Iterable[torch.Tensor], device: torch.device, host: HostMemory, where: str
) -> None:
    """Optimizers of `parameters` are offloaded at their first step, for as long as `owner` lives."""
    planned, known = {id(each) for each in parameters}, weakref.WeakSet[Optimizer]()

    def before_step(_: nn.Module, optimizer: Optimizer, *step: Any) -> None:
        if optimizer in known:
            return
        known.add(optimizer)
        own = any(id(each) in planned for group in optimizer.param_groups for each in group["params"])
        if own and OFFLOADED not in optimizer.__dict__:
            optimizer.register_step_pre_hook(offloaded_step(optimizer, host, device).update)

    if where:
        around_optimizer_steps(owner, before=before_step)


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that its own step runs on after the update."""
    empty: Optimizer = object.__new__(type(optimizer))
    empty.__dict__.update(optimizer.__dict__)
    empty.param_groups = []
    return empty
