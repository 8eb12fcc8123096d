"""Tensors that a module of the parallel model has beside those registered with it: tied ones under their further names, and those
of other stages of a pipeline, with shape, dtype and size, and no values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import StateError
from ..module import ParameterSpec
from ..state.materialize import State

_KNOWN = frozenset(
    ("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "itemsize", "element_size", "nbytes", "is_meta")
    + ("stride", "is_floating_point", "is_complex", "layout", "requires_grad", "grad", "is_leaf", "len", "hash", "get", "device")
    + ("is_sparse", "is_quantized", "names", "is_cuda", "is_cpu")
)
"""What may be asked of one."""


class OnAnotherStage(torch.Tensor):
    """On the meta device. `said`: what is told when its values are read."""

    said: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        word = getattr(func, "__name__", "").strip("_")
        if word == "get":  # of a property
            word = getattr(getattr(func, "__self__", None), "__name__", word)
        if word in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        me = next((each for each in args if isinstance(each, OnAnotherStage)), None)
        raise StateError(me.said if me is not None else f"{word} of a parameter of another stage")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.said}>"


def further_tensors(state: State, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """By their name in the plain model; `names` are its keys with the first name of each tensor."""
    held: dict[str, torch.Tensor] = {**state.parameters, **state.buffers}
    index = state.index
    away = {n: _on_another_stage(n, spec, index.holders[n][0]) for n, spec in index.specs.items() if n not in held}
    every = held | away
    return away | {key: every[name] for key, name in names.items() if key != name and name in every}


def _on_another_stage(name: str, spec: ParameterSpec, stage: int) -> OnAnotherStage:
    out = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta").as_subclass(OnAnotherStage)
    out.requires_grad_(spec.trainable and not spec.buffer)
    out.said = (
        f"{name} is on stage {stage} of the pipeline, and has no values here: read parallel.full_state(), which every rank calls"
    )
    return out
