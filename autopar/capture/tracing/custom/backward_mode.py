"""The mode in which the backward of a custom ``autograd.Function`` is called while a model is traced.

PyTorch calls it without gradients, so that ``detach()``, ``.data`` and ``no_grad`` in it change nothing, and what it reads
(saved tensors, parameters of ``ctx.module``) is data. Here autograd must see how what it gives comes from the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_map_only

from autopar.capture.tracing.places import is_users
from autopar.runtime.compat.hooks import replaced

_DETACHES = ("detach", "detach_")
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_ASKS: Any = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_REQUIRES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def _shape_only(name: str) -> int | None:
    """The argument of which a function of this name reads the shape and the dtype alone."""
    if name.endswith("_like") or name.startswith("new_"):
        return 0
    return 1 if name.endswith("_as") or name == "to" else None


def product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``linear(input, weight, bias)`` as operations whose derivative export follows."""
    out = input @ weight.t()
    return out if bias is None else out + bias.to(out.dtype)


class BackwardMode(TorchFunctionMode):
    """While active, derivatives flow from `seeds` alone, and nothing detaches. `likes` are tensors of the shapes of the seeds."""

    def __init__(self, seeds: Sequence[Tensor | None], likes: Sequence[Any]) -> None:
        super().__init__()
        self.own = {id(seed): seed for seed in seeds if seed is not None}
        self.outer: dict[int, tuple[Tensor, Tensor]] = {}
        self.enabled = False
        self.likes = {id(seed): like for seed, like in zip(seeds, likes, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            self.enabled = args[0]
            return None
        if func == _ASKS:
            return id(args[0]) not in self.own and func(*args)
        args, kwargs = self.inside((args, dict(kwargs or {})))
        return self.keep(self.answer(func, getattr(func, "__name__", ""), args, kwargs))

    def answer(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the function gives where gradients are not asked for, with its derivative."""
        if func in _REQUIRES:
            return args[0]
        if name in _DETACHES or func == _DATA:
            return args[0] if name == "detach_" else args[0].view_as(args[0])
        if func is torch.nn.functional.linear:
            return product(*args, **kwargs)
        place = _shape_only(name)
        return func(*(self.blank(arg) if number == place else arg for number, arg in enumerate(args)), **kwargs)

    def blank(self, x: Any) -> Any:
        """Return a tensor of this shape that no gradient flows from; what is no tensor, or has none, as it is."""
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        like = self.likes.get(id(x))
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if like is None else like

    def inside(self, values: Any) -> Any:
        """Return these values with the tensors from outside as data of the backward's own, which it may write."""
        return tree_map_only(Tensor, self._inside, values)

    def _inside(self, x: Tensor) -> Tensor:
        if id(x) in self.own:
            return x
        if id(x) not in self.outer:
            self.outer[id(x)] = x, self.keep((x.detach() if x.requires_grad else x).clone())
        return self.outer[id(x)][1]

    def keep(self, values: Any) -> Any:
        """Note the tensors of these values as made in the backward; an id is its tensor's for as long as the tensor lives."""
        tree_map_only(Tensor, lambda x: self.own.setdefault(id(x), x), values)
        return values


def in_backward() -> bool:
    """Whether the backward of a custom function is traced."""
    return any(isinstance(mode, BackwardMode) for mode in _get_current_function_mode_stack())


@contextmanager
def modes_are_those_of(mode: BackwardMode) -> Iterator[None]:
    """While active, the user's code, and ``torch.no_grad`` in it, are told the grad mode that the backward has in PyTorch."""
    real = torch.is_grad_enabled

    def answer() -> bool:
        file = sys._getframe(1).f_code.co_filename
        of_user = in_backward() and (is_users(file) or file == grad_mode.__file__)  # not in what the mode calls
        return mode.enabled if of_user else real()

    inference = replaced(torch._C, "_InferenceMode", lambda mode: nullcontext())
    with replaced(torch, "is_grad_enabled", answer), inference:
        yield
