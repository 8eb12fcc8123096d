"""The gradient of a parameter, a DTensor whose reductions (its norm) are those of the whole tensor, on every rank and at once.

DTensor leaves a reduction partial until an operation needs it whole: in-place operations on a partial one are refused, and a rank
that asks for its number waits for the others. A stage of a pipeline has the gradients of its own parameters only. What is
computed of one gradient is right there; the norm of all gradients (`torch.nn.utils.clip_grad_norm_`, the norm of stacked norms)
is summed over the stages; `tensors.stage_values` has other combinations of several gradients.
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
from ..compat.dtensor import local_of, over_local, whole, without_overrides
from ..device.mesh import MeshHandle
from ..errors import RuntimeProblem
from .stage_gradients import PARAMETER, StageGradients, combined, origins_of, place_of, stages_of

_VIEWS = frozenset((
    *("view", "reshape", "flatten", "ravel", "detach", "to_dense", "contiguous", "view_as"),
    *("getitem", "select", "narrow", "squeeze", "unsqueeze", "t", "transpose", "permute", "diagonal"),
))  # fmt: skip
_JOINS = frozenset(("stack", "cat", "concat", "concatenate", "hstack", "vstack"))
_NORMS = frozenset(("linalg_vector_norm", "linalg_norm", "norm"))


class Gradient(DTensor):
    """A gradient whose reductions are those of the whole tensor. `stage`: that of a pipeline which has it. `autopar_order`: see
    `compat.hooks.whole_items`."""

    stage: StageGradients | None
    parameter_name: str
    autopar_order: torch.Tensor | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").startswith("_foreach_") and not is_traced():
            if len(parts := by_mesh(args[0])) > 1:
                results = on_each_mesh(func, parts, args, kwargs or {})
                return list(map(local_of, results)) if func.__name__ == "_foreach_norm" else results  # numbers on no mesh
            if func.__name__ == "_foreach_norm":
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
            return as_gradient(result, me.stage, me.parameter_name)
        if word == "clone" and isinstance(result, DTensor):  # of one element too: what SGD's momentum begins with
            return result
        return _whole(result, me)

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> Gradient:  # of what torch.compile traces
        return as_gradient(DTensor.__tensor_unflatten__(inner, spec, size, stride), None, "")

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write what is computed of gradients into this rank's part. On 2.13.0 a DTensor keeps its part, without a word."""
        if not isinstance(value, DTensor) or value.shape != self.shape or value.dtype != self.dtype:
            raise RuntimeProblem(
                f"the .data of the gradient of {self.parameter_name or 'a parameter'} was set to {type(value).__name__} "
                f"{tuple(value.shape)} {value.dtype}: compute it of the gradient (p.grad.data * 0.9), whose shards it then has"
            )
        if value.placements != self.placements:
            value = value.redistribute(self.device_mesh, self.placements)
        with torch.no_grad():
            self.to_local().copy_(value.to_local())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if place_of(self)[0] is not None:  # loaded again, its norm would be that of a stage
            raise RuntimeProblem(
                "a gradient of a stage of a pipeline cannot be pickled: save parallel.full_gradients(), which all ranks call"
            )
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:  # torch's wants clones of this class
        values: Any = self.detach().clone()
        memo[id(self)] = out = as_gradient(values, self.stage, self.parameter_name)
        return out


class StageNorms(torch.Tensor):
    """Numbers computed each of one gradient of a stage: one of them (a scalar), or several in a row."""

    stage: StageGradients
    parameter_names: tuple[str, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        word = getattr(func, "__name__", "").strip("_")
        norms = [each for each in (*flat(args), *flat(kwargs.values())) if isinstance(each, StageNorms)]
        stage, names = norms[0].stage, tuple(name for each in norms for name in each.parameter_names)
        row = next((each for each in norms if each.dim()), None) if word not in ("get", "dim") else None
        if row is not None and word in _NORMS:
            order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2.0))
            return stage.total_norm(row.as_subclass(torch.Tensor), names, 2.0 if order in (None, "fro") else float(order))
        result = without_overrides(func, *args, **kwargs)
        if type(result) not in (torch.Tensor, StageNorms):
            return result
        if word in _JOINS and all(isinstance(each, StageNorms) for each in args[0]):
            return _norms(result, stage, names)
        known = {name.removeprefix(PARAMETER): name for name in names if name}
        if len(known) > 1 and result.shape != (len(names),):
            raise combined(word)
        return _norms(result, stage, names if result.dim() else tuple(known.values())[:1] or names[:1])

    def full_tensor(self) -> torch.Tensor:
        """Return itself: scripts for FSDP2 ask the norm of a DTensor for the whole one."""
        return self

    def __format__(self, style: str) -> str:  # torch's is of its own class alone
        return format(self.as_subclass(torch.Tensor), style)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def as_gradient(value: DTensor, stage: StageGradients | None, name: str) -> Gradient:
    """Return a `Gradient` over the data of `value`."""
    if isinstance(value, Gradient):
        return value
    out: Gradient = over_local(Gradient, value)
    out.__dict__.update(value.__dict__)  # what it is a view of
    out.stage, out.parameter_name = stage, name
    return out


def local_gradient(canonical: nn.Parameter, local: torch.Tensor) -> Gradient:
    """The gradient of a canonical parameter whose part on this rank is `local`."""
    assert isinstance(canonical, DTensor)
    out: Gradient = over_local(Gradient, canonical, local)
    out.stage, out.parameter_name = place_of(canonical)
    out.autopar_order = getattr(canonical, "autopar_order", None)
    return out


def gradient_of(canonical: nn.Parameter, value: DTensor) -> Gradient:
    """Return `value` as the gradient of a canonical parameter, see `own`."""
    out = as_gradient(value, *place_of(canonical))
    out.autopar_order = getattr(canonical, "autopar_order", None)
    return out


def own(canonical: nn.Parameter, stage: StageGradients | None, name: str) -> None:
    """Make a `Gradient`, placed as the parameter is, of what autograd adds to the parameter's gradient too."""
    canonical.autopar_place = (stage, name)  # type: ignore[attr-defined]

    def wrap(parameter: torch.Tensor) -> None:
        gradient, data = parameter.grad, parameter.data
        if isinstance(gradient, DTensor) and isinstance(data, DTensor) and isinstance(parameter, nn.Parameter):
            placed = gradient.placements == data.placements  # or gathered by what it was computed with
            parameter.grad = gradient_of(parameter, gradient if placed else gradient.redistribute(placements=data.placements))

    wrap.autopar = True  # type: ignore[attr-defined]
    if canonical.requires_grad:
        canonical.register_post_accumulate_grad_hook(wrap)


def stand_in(device: torch.device, stage: StageGradients | None) -> nn.Parameter:
    """A parameter without elements for an optimizer of a stage that has none of those that it trains; a matrix, as Muon wants."""
    parameter = nn.Parameter(torch.empty(0, 0, device=device))
    own(parameter, stage, "")
    return parameter


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
    result = whole(result)
    if result.dim():
        return result
    number = result.to_local()
    return number if me.stage is None else _norms(number, me.stage, (me.parameter_name,))


def _norms(values: torch.Tensor, stage: StageGradients, names: tuple[str, ...]) -> StageNorms:
    out = values.as_subclass(StageNorms)
    out.stage, out.parameter_names = stage, names
    return out


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
    norms = zip(whole_norms(parts, ord), parts, tensors, strict=True)
    return [stage_norm(norm.to(local_of(part).dtype), each) for norm, part, each in norms]  # .dtype would ask here again


def stage_norm(norm: torch.Tensor, value: DTensor) -> torch.Tensor:
    """The norm of a value: one that asks all stages where it is combined with others, if `value` is a parameter of a pipeline,
    its gradient, or computed of one of them."""
    if isinstance(value, Gradient):
        return norm if value.stage is None else _norms(norm, value.stage, (value.parameter_name,))
    stage, name = place_of(value)
    if stage is not None:
        return _norms(norm, stage, (f"{PARAMETER}{name}",))
    own = [(stage, name) for stage, name in origins_of(value) if stage is not None]
    if len(own) == 1:
        return _norms(norm, own[0][0], (own[0][1],))
    stage = next(iter(stages_of(value)), None)
    return norm if stage is None else _norms(norm, stage, ("",))


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
