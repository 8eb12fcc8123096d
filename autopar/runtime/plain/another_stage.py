"""Parameters and buffers of other stages of a pipeline: shape, dtype and size without values. Writing numbers into one
(``nn.init.zeros_``, ``weight.data.normal_()``) does nothing here, since the stage that has it writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.dtensor import meta_tensor, without_overrides
from ..errors import StateError
from ..module import ParameterSpec

_KNOWN = frozenset(
    ("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "itemsize", "element_size", "nbytes", "is_meta")
    + ("stride", "is_floating_point", "is_complex", "layout", "requires_grad", "grad", "is_leaf", "len", "hash", "get", "device")
    + ("is_sparse", "is_quantized", "names", "is_cuda", "is_cpu")
)
"""The questions that may be asked of one."""

QUESTIONS_OF_SHAPE = _KNOWN - {"grad", "is_meta", "device", "is_cuda", "is_cpu"} | {"data", "detach"}
"""Those whose answer a tensor without data gives as the model's own."""

_VIEWS = frozenset(
    ("data", "detach", "getitem", "select", "narrow", "view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "t", "T")
    + ("unbind", "chunk", "split", "diagonal")
)
"""They are written like the whole."""


class OnAnotherStage(torch.Tensor):
    """A tensor of another stage, or a view of one, on the meta device. `message`: of the error when its values are read.
    `is_parameter`: one, or the data of one."""

    message: str
    is_parameter = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        every = list(tensors_in((args, tuple(kwargs.values()))))
        me = next(each for each in every if isinstance(each, OnAnotherStage))
        full, word = function_name(func)
        sets = full == "__set__"
        if word in _KNOWN and (word != "grad" or not sets or args[1] is None):
            return without_overrides(func, *args, **kwargs)
        others = [each for each in every if each is not me]
        if word in _VIEWS and not sets and not others:
            return _like(without_overrides(func, *args, **kwargs), me, me.is_parameter and word in ("data", "detach"))
        writes = full == "__setitem__" or full[:3] == "__i" or (full[-1:] == "_" and full[:2] != "__")
        in_place = word == "data" if sets else writes
        written = kwargs.get("out", args[0] if in_place and args else kwargs.get("tensor"))  # nn.init passes it by its name
        if written is me and not any(_refused(each, me, sets) for each in others):
            return me
        raise StateError(me.message)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.message}>"


def function_name(func: Any) -> tuple[str, str]:
    """Return the name of a function of torch (``__get__`` of a property), and the word for it (``grad``)."""
    full = word = getattr(func, "__name__", "")
    if full in ("__get__", "__set__"):  # of a property
        word = getattr(getattr(func, "__self__", None), "__name__", word)
    return full, word.strip("_")


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in values, and in lists of them."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from tensors_in(each)
        elif isinstance(each, torch.Tensor):
            yield each


def _refused(value: torch.Tensor, me: OnAnotherStage, sets: bool) -> bool:
    """Return whether a tensor is not written into `me`: one of the model's, whose values other ranks have, or a whole one, which
    the stage that has the parameter refuses too (``parameter.copy_(value)``)."""
    if isinstance(value, OnAnotherStage):
        return value.message != me.message
    pair = me.is_parameter and value.shape == me.shape and value.dtype != torch.bool and not sets
    return isinstance(value, (DTensor, nn.Parameter)) or pair


def _like(result: Any, me: OnAnotherStage, is_parameter: bool) -> Any:
    if isinstance(result, (list, tuple)):
        return type(result)(_like(each, me, is_parameter) for each in result)
    out = result.as_subclass(OnAnotherStage)
    out.message, out.is_parameter = me.message, is_parameter
    return out


def on_another_stage(name: str, spec: ParameterSpec, stage: int) -> OnAnotherStage:
    """The parameter or buffer `name` of a stage."""
    out = meta_tensor(spec.shape, getattr(torch, spec.dtype)).as_subclass(OnAnotherStage)
    out.requires_grad_(spec.trainable and not spec.buffer)
    out._is_param = out.is_parameter = not spec.buffer  # what isinstance(..., nn.Parameter) asks for
    out.message = (
        f"{name} is on stage {stage} of the pipeline, and has no values here: read parallel.full_state(), and write by "
        "parallel.load_state_dict(state), which every rank calls"
    )
    return out
