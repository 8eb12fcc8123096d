"""The parameters and buffers of the plain model, whose optimizers and later changes would train nothing, are watched.

Only weak references to its tensors are kept, so that the plain model can be freed, and samples of their values, which edits of
``.data`` change and no version counts.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import RuntimeProblem

_WINDOW_BYTES = 256


class PlainTensors:
    """The tensors of the plain `model` as they are now. `updated`: buffers that the forward writes into, which may change."""

    def __init__(self, model: nn.Module, updated: Collection[str] = ()) -> None:
        changing = {id(each) for module in model.modules() if isinstance(module, _NormBase) for each in module.buffers(False)}
        buffers = [(name, each) for name, each in model.named_buffers() if id(each) not in changing and name not in updated]
        every = (*model.named_parameters(), *buffers)
        self._tensors = {name: (weakref.ref(each), each.requires_grad, _version(each)) for name, each in every}
        self._samples = {name: ValueSample(each) for name, each in every}
        self._kinds = {name: (each.device, each.dtype) for name, each in every}
        self._ids = {id(p): (name, weakref.ref(p)) for name, p in model.named_parameters()}
        me = weakref.ref(self)  # hooks of all optimizers are removed with this object
        for register, closures in ((register_optimizer_step_pre_hook, False), (register_optimizer_step_post_hook, True)):
            weakref.finalize(self, register(partial(_look, me, closures)).remove)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """RuntimeProblem where the optimizer has parameters of the plain model and no gradient for any of them: a script that
        trains the plain model too has."""
        name = ""
        every: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in every:
            known, reference = self._ids.get(id(parameter), ("", None))
            if reference is None or reference() is not parameter:
                continue
            if parameter.grad is not None:
                return
            name = name or known
        if name:
            raise RuntimeProblem(
                f"this {type(optimizer).__name__} has the parameters of the plain model ({name} ...), and would train nothing: "
                "move the line that makes it below autopar.parallelize, and give it parallel.parameters()"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that a script which trains the plain model too has changed it."""
        for group in optimizer.param_groups:
            for name in (self._ids[id(each)][0] for each in group["params"] if id(each) in self._ids and each.grad is not None):
                reference, before, _ = self._tensors[name]
                if (tensor := reference()) is not None:
                    self._tensors[name], self._samples[name] = (reference, before, _version(tensor)), ValueSample(tensor)

    def check_unchanged(self, equal: Callable[[str, torch.Tensor], bool]) -> None:
        """RuntimeProblem where `requires_grad` or the values of the plain model's tensors have changed since, unless they are
        `equal` to those of the parallel model (loaded from its full state)."""
        for name, (reference, before, version) in self._tensors.items():
            now = reference()
            if now is None:
                continue
            sample = self._samples[name]
            if (new := _version(now)) != version or sample.now() != sample.first:
                moved = self._kinds[name] != (now.device, now.dtype)
                if not moved and not equal(name, now.detach()):
                    raise RuntimeProblem(
                        f"{name} of the plain model was changed after autopar.parallelize, which the parallel model does not "
                        "see: change it before, or call parallel.load_full_state(model.state_dict()); for other values "
                        "take a copy (copy.deepcopy) of the model"
                    )
                self._tensors[name], self._kinds[name] = (reference, before, new), (now.device, now.dtype)
                self._samples[name] = ValueSample(now)
            if now.requires_grad != before:
                raise RuntimeProblem(
                    f"{name}.requires_grad of the plain model was changed after autopar.parallelize, which the parallel model "
                    "does not see: change it before, or freeze the parallel model's parameter of that name"
                )


class ValueSample:
    """A few hundred bytes of a tensor in host memory, from begin, middle and end. `first`: the bytes when it was made; empty for
    other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        count = tensor.numel() * tensor.element_size()
        readable = type(tensor.data) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and count
        size = min(count, _WINDOW_BYTES)
        offsets = sorted({0, (count - size) // 2, count - size}) if readable else ()
        window: Any = ctypes.c_char * size
        self._windows = [window.from_address(tensor.data_ptr() + offset) for offset in offsets]
        self.first = self.now()

    def now(self) -> list[bytes]:
        """The bytes as they are. Only while the tensor is there, at the same address."""
        return [each.raw for each in self._windows]


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return numbers of which one is another after a change of the tensor's values."""
    return 0 if tensor.is_inference() else tensor._version, 0 if tensor.is_meta else tensor.data_ptr()


def _look(plain: weakref.ref[PlainTensors], closures: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer before its step, or after one whose closure has run the model."""
    tensors, closure = plain(), kwargs.get("closure", next(iter(args[1:]), None))
    if tensors is not None and (closure is not None) == closures:
        tensors.check_optimizer(optimizer)
    if tensors is not None and closures:
        tensors.after_step(optimizer)
