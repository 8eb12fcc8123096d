"""The gradient of a parameter, a DTensor whose reductions (its norm) are those of the whole tensor, on every rank and at once.

DTensor leaves a reduction partial until an operation needs it whole: in-place operations on a partial one are refused, and a rank
that asks for its number waits for the others. On a pipeline a reduction is that of the stages which hold the gradient
(`stage_tensors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.norms import norm_over_ranks, whole_norms
from ..compat.compile import is_traced
from ..compat.dtensor import local_of, over_local, whole
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem
from .stage_tensors import Holders, OnAnotherStage, for_holders, held_by, holders_of, on_another_stage

_VIEWS = frozenset((
    *("view", "reshape", "flatten", "ravel", "detach", "to_dense", "contiguous", "view_as"),
    *("getitem", "select", "narrow", "squeeze", "unsqueeze", "t", "transpose", "permute", "diagonal"),
))  # fmt: skip


class Gradient(DTensor):
    """A gradient whose reductions are those of the whole tensor. `autopar_order`: see `compat.hooks.whole_items`."""

    parameter_name: str
    autopar_order: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").startswith("_foreach_") and not is_traced():
            numbers = func.__name__ == "_foreach_norm" and not any(map(holders_of, args[0]))
            if len(parts := by_mesh(args[0])) > 1:
                results = on_each_mesh(func, parts, args, kwargs or {})
                return list(map(local_of, results)) if numbers else results  # on no mesh
            if numbers:
                return _list_norms(*args, **(kwargs or {}))
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if not isinstance(result, (torch.Tensor, list, tuple)):  # a property: optimizers ask `is_sparse` of each
            return result
        if is_traced() and not _is_elementwise(result, args):
            raise RuntimeProblem(
                f"torch.compile cannot trace {getattr(func, '__name__', func)} of a gradient, which is that of the whole tensor: "
                "clip and take norms outside of the compiled function, or leave this optimizer's step uncompiled"
            )
        word = getattr(func, "__name__", "").strip("_")
        me = next((each for each in flat(args) if isinstance(each, Gradient)), None)
        if me is None:
            return result
        if isinstance(result, (list, tuple)):
            if func.__name__.endswith("_"):  # of ``torch._foreach_mul_``: what was passed
                return result
            return type(result)(_whole(each, me) for each in result) if type(result) in (list, tuple) else result
        if word in _VIEWS and isinstance(result, DTensor):
            return as_gradient(result, me.parameter_name)
        if word == "clone" and isinstance(result, DTensor):  # of one element too: what SGD's momentum begins with
            return result
        return _whole(result, me)

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Gradient:  # of what torch.compile traces
        return as_gradient(DTensor.__tensor_unflatten__(inner, spec, size, stride), "")

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write what is computed of gradients into this rank's part. On 2.13.0 a DTensor keeps its part, without a word."""
        value = for_holders(self, value)
        if not isinstance(value, DTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeProblem(
                f"the .data of the gradient of {self.parameter_name or 'a parameter'} was set to {type(value).__name__} "
                f"{tuple(value.shape)} {value.dtype}: compute it of the gradient (p.grad.data * 0.9), whose shards it then has"
            )
        if value.placements != self.placements:
            value = value.redistribute(self.device_mesh, self.placements)
        with torch.no_grad():
            self.to_local().copy_(value.to_local())

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:  # torch's wants clones of this class
        values: Any = self.detach().clone()
        memo[id(self)] = out = as_gradient(values, self.parameter_name)
        return out


def name_of(value: torch.Tensor) -> str:
    """Return the name of a canonical parameter, or of the one whose gradient it is; "" of any other tensor."""
    named = value.__dict__
    name: str = named.get("parameter_name") or named.get("autopar_name", "")
    return name


def as_gradient(value: DTensor, name: str) -> Gradient:
    """Return a `Gradient` over the data of `value`."""
    if isinstance(value, Gradient):
        return value
    out: Gradient = over_local(Gradient, value)
    out.__dict__.update(value.__dict__)  # what it is a view of
    out.parameter_name = name
    return out


def local_gradient(canonical: nn.Parameter, local: torch.Tensor) -> Gradient:
    """The gradient of a canonical parameter whose part on this rank is `local`."""
    assert isinstance(canonical, DTensor)
    out: Gradient = over_local(Gradient, canonical, local)
    out.parameter_name = name_of(canonical)
    out.autopar_order = getattr(canonical, "autopar_order", None)
    held_by(out, holders_of(canonical))
    return out


def gradient_of(canonical: nn.Parameter, value: DTensor) -> Gradient:
    """Return `value` as the gradient of a canonical parameter, see `own`."""
    out = as_gradient(value, name_of(canonical))
    out.autopar_order = getattr(canonical, "autopar_order", None)
    held_by(out, holders_of(canonical))
    return out


def own(canonical: nn.Parameter, holders: Holders | None, name: str) -> None:
    """Make a `Gradient`, placed as the parameter is, of what autograd adds to the parameter's gradient too."""
    canonical.autopar_name = name  # type: ignore[attr-defined]
    held_by(canonical, holders)

    def wrap(parameter: Any) -> None:
        if not isinstance(parameter, DTensor) or not isinstance(parameter.grad, DTensor):
            return
        gradient: Any = for_holders(parameter, parameter.grad)
        if isinstance(parameter, OnAnotherStage):
            if (holders := holders_of(parameter)) and not isinstance(gradient, OnAnotherStage):
                gradient = on_another_stage(parameter.shape, parameter.dtype, holders)
        else:
            if gradient.placements != parameter.placements:  # gathered by what it was computed with
                gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient_of(parameter, gradient)  # type: ignore[arg-type]
        parameter.grad = gradient

    wrap.autopar = True  # type: ignore[attr-defined]
    if canonical.requires_grad:
        canonical.register_post_accumulate_grad_hook(wrap)


def hooked(parameter: torch.Tensor) -> bool:
    """Return whether the user has registered a hook of its gradient. Those of torch's own tools (`MemTracker`) do not count."""
    for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
        for hook in hooks.values() if hooks else ():
            if not (getattr(hook, "autopar", False) or str(getattr(hook, "__module__", "")).startswith("torch.")):
                return True
    return False


def _is_elementwise(result: Any, args: Any) -> bool:
    """Return whether a call makes tensors that are placed as these gradients are, which needs no other rank."""
    shapes = [each._spec.shape for each in flat(args) if isinstance(each, Gradient)]  # .shape would ask here again
    made = [each for each in flat((result,)) if isinstance(each, torch.Tensor)]
    specs = [each._spec for each in made if isinstance(each, DTensor)]
    placed = all(each.shape in shapes and not any(at.is_partial() for at in each.placements) for each in specs)
    return placed and len(specs) == len(made)


def _whole(result: Any, me: Gradient) -> Any:
    """A reduction of a gradient: its whole value on every rank, an ordinary tensor if it is a number."""
    if not isinstance(result, DTensor) or isinstance(result, Gradient):
        return result
    if holders_of(me) is not None:
        return held_by(whole(result), holders_of(result))
    result = whole(result)
    return result if result.dim() else result.to_local()


def by_mesh(tensors: Sequence[Any]) -> list[list[int]]:
    """The positions of tensors by the mesh that they are on: those of several models, or of none, may be in one list."""
    positions: dict[DeviceMesh | None, list[int]] = {}
    for position, each in enumerate(tensors):
        positions.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(position)
    return list(positions.values())


def on_each_mesh(function: Any, parts: Sequence[Sequence[int]], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operation on lists once for each part of their positions."""
    results = dict[int, Any]()
    for part in parts:
        # lists of numbers have one for each tensor
        lists = ([each[position] for position in part] if isinstance(each, (list, tuple)) and each else each for each in args)
        results.update(zip(part, function(*lists, **kwargs) or (), strict=False))  # none of an operation that writes
    return [results[position] for position in sorted(results)] or None


def _list_norms(tensors: Sequence[DTensor], ord: float = 2.0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:  # noqa: A002
    """The norms of gradients on one mesh, each as a whole, on every rank: what ``torch._foreach_norm`` gives."""
    parts: Any = tensors if dtype is None else [each.to(dtype) for each in tensors]
    return [norm.to(local_of(part).dtype) for norm, part in zip(whole_norms(parts, ord), parts, strict=True)]


def flat(values: Any) -> Iterator[Any]:
    """Yield arguments, and the members of those that are lists."""
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from each
        else:
            yield each


def total_norm(gradients: Sequence[DTensor], mesh: MeshHandle, norm_type: float) -> torch.Tensor:
    """The norm over all elements of all tensors of all stages, a scalar equal on all ranks.

    In a pipeline it is float64: stages may have gradients of different dtypes, or none.
    """
    norms = whole_norms(gradients, norm_type) if gradients else torch.zeros(1, device=mesh.device)
    value: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    if mesh.pp.size > 1:
        value = norm_over_ranks(value.double(), norm_type, mesh.group(mesh.pp.name))
    return value


@torch.no_grad()
def clip_gradients(
    gradients: list[DTensor], counted: list[DTensor], mesh: MeshHandle, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before. `counted`: those that no other
    stage counts."""
    norm = total_norm(counted, mesh, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients:
        torch._foreach_mul_([gradient.to_local() for gradient in gradients], factor)
    return norm
