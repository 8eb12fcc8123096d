"""The outputs of a program as `parallel(...)` returns them (`results`: in the model's own class).

An output comes back as a full tensor that takes gradients (every rank computes the same with it), as a full tensor without, or as
a DTensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..comm.conversions import dtensor_placement, shard_of
from ..comm.convert import convert
from ..compat.autograd import apply
from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import RuntimeProblem
from ..module import Program

EVERYTHING = "*"
"""Asks for all tensors of the result: what a call without gradients returns."""


def join_micro_batches(program: Program, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs of a batch from those of its micro-batches: concatenated where the data axis shards them, summed where it has
    partial sums. What another axis shards along the same dimension is gathered first: the parts of several micro-batches are not
    one shard."""
    out = []
    for where, each in zip(program.outputs.values(), zip(*parts, strict=True), strict=True):
        if len(each) > 1:
            with torch.no_grad():
                each = tuple(_gathered(part, dict(where), _model_axes_within(where), program.mesh)[0] for part in each)
        out.append(_joined(where.get(DATA_AXIS, "R"), each))
    return out


def _joined(where: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 or where in ("R", "I"):
        return parts[-1]
    if cut := shard_of(where):
        dim, count = cut
        return torch.cat([part.unflatten(dim, (count, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)
    return reduce_parts(torch.stack(list(parts)), where)


def reduce_parts(stacked: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce the first dimension; `op`: max, min or sum, or a partial placement (``P(max)``)."""
    return stacked.amax(0) if "max" in op else stacked.amin(0) if "min" in op else stacked.sum(0)


def _model_axes_within(where: Mapping[str, str]) -> set[str]:
    """The model axes that shard the dimension that the data axis shards."""
    data = shard_of(where.get(DATA_AXIS, "R"))
    return {name for name, text in where.items() if name != DATA_AXIS and data and (cut := shard_of(text)) and cut[0] == data[0]}


def _gathered(
    local: torch.Tensor, where: dict[str, str], axes: Collection[str], mesh: MeshHandle, target: str = "R"
) -> tuple[torch.Tensor, dict[str, str]]:
    """Return `local` with these axes gathered to `target` (R or I), innermost first. Within what outer axes with fewer parts have
    sharded, there are fewer parts."""
    for name in reversed(list(mesh.axes)):
        cut = shard_of(where.get(name, "R"))
        if name not in axes or cut is None:
            continue
        dim, count = cut
        for other, text in where.items():
            outer = shard_of(text)
            if other != name and outer and outer[0] == dim and outer[1] < count:
                count //= mesh.axis(other).size
        local, where[name] = convert(local.contiguous(), mesh.axis(name), f"S({dim},{max(1, count)}) -> {target}"), target
    return local, where


def returned_outputs(program: Program, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """The outputs by path, each as its kind says. In a pipeline DTensors are None on all stages but the last."""
    out: dict[str, torch.Tensor | None] = {}
    for number, (path, where) in enumerate(program.outputs.items()):
        local, where = (values[number] if values else None), _joined_placements(program, where)
        kind = program.output_kinds.get(path, "dtensor")
        if kind == "gradient" and local is not None:
            out[path] = _with_gradient(local, where, program.mesh)
        elif kind == "full":
            out[path] = _full(path, local, where, program)
        else:
            out[path] = None if local is None else _as_dtensor(path, local, where, program)
    return out


def _with_gradient(local: torch.Tensor, where: Mapping[str, str], mesh: MeshHandle) -> torch.Tensor:
    """The full tensor, Invariant on every axis: all ranks compute the same with it, and each takes its part of the gradient."""
    places = dict(where)
    for name in mesh.axes:
        if places.get(name, "R")[0] in "PR":
            local, places[name] = convert(local, mesh.axis(name), f"{places.get(name, 'R')} -> I"), "I"
    local, _ = _gathered(local, places, list(mesh.axes), mesh, "I")
    return apply(FirstOrder, local) if local.requires_grad else local


def _full(path: str, local: torch.Tensor | None, where: Mapping[str, str], program: Program) -> torch.Tensor:
    """The full tensor on every rank, of all stages, without its graph."""
    mesh = program.mesh
    with torch.no_grad():
        if local is not None:
            local, places = _simple_placements(local.detach(), dict(where), mesh)
            local = _gathered(local, places, list(mesh.axes), mesh)[0].contiguous()
        if mesh.pp.size > 1:
            local = _from_last_stage(local, program)
    assert local is not None
    return local if program.forward_only else _only_the_loss(path, local)


def _from_last_stage(local: torch.Tensor | None, program: Program) -> torch.Tensor:
    mesh, group = program.mesh, program.mesh.group(program.mesh.pp.name)
    stages: Sequence[int] = program.__dict__["chunk_stages"]
    source = mesh.rank_in_stage(stages[-1])
    kinds: list[Any] = [None if local is None else (tuple(local.shape), local.dtype)]
    dist.broadcast_object_list(kinds, source, group, device=mesh.device)
    shape, dtype = kinds[0]
    whole = torch.empty(shape, dtype=dtype, device=mesh.device) if local is None else local
    dist.broadcast(whole, source, group)
    return whole


def _joined_placements(program: Program, where: Mapping[str, str]) -> dict[str, str]:
    """The placements of what `join_micro_batches` returns."""
    gathered = _model_axes_within(where) if program.micro_batches > 1 else set()
    return {name: "R" if name in gathered else text for name, text in where.items()}


def _as_dtensor(path: str, local: torch.Tensor, where: Mapping[str, str], program: Program) -> DTensor:
    mesh = program.mesh
    with torch.no_grad():
        local, where = _simple_placements(local.detach(), dict(where), mesh)
    local = local if program.forward_only else _only_the_loss(path, local)
    places = [dtensor_placement(where.get(name, "R") if mesh.axis(name).size > 1 else "R") for name in mesh.launched_axes]
    return DTensor.from_local(local, mesh.device_mesh, places, run_check=False)


def _simple_placements(local: torch.Tensor, where: dict[str, str], mesh: MeshHandle) -> tuple[torch.Tensor, dict[str, str]]:
    """Replace placements that DTensor cannot express simply: partial sums are reduced; strided (``S(2,3)``) and uneven shards are
    gathered, and those of axes of this program alone (`MeshHandle.for_variant`)."""
    for name, text in where.items():
        if text.startswith("P") and mesh.axis(name).size > 1:
            local = convert(local, mesh.axis(name), f"{text} -> R")
        if text.startswith("P"):
            where[name] = "R"
    cut = {name: shard for name in mesh.axes if (shard := shard_of(where.get(name, "R")))}
    own = {name for name in mesh.axes if mesh.launched_axes.get(name) != mesh.axis(name).size}
    odd = {name for name, (_, count) in cut.items() if count > 1 or mesh.axis(name).shares or name in own}
    strided = {cut[name][0] for name in odd}
    names = [name for name, (dim, _) in cut.items() if dim in strided]
    first = next((number for number, name in enumerate(names) if name in odd), len(names))
    return _gathered(local, where, names[first:], mesh)


def _only_the_loss(path: str, value: torch.Tensor) -> torch.Tensor:
    """An output without its graph, through which a backward is an error rather than no gradient."""
    if not torch.is_grad_enabled() or not value.is_floating_point():
        return value
    return apply(_OnlyTheLoss, path, value, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return]


class _OnlyTheLoss(torch.autograd.Function):
    """Detaches an output; a backward through it raises and says so."""

    @staticmethod
    def forward(ctx: Any, path: str, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.path = path
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise RuntimeProblem(
            f"a gradient into the output {ctx.path}, which comes without its graph: only the loss takes gradients; detach() it "
            "(where the model itself detaches it, one process gives it none either), ask for it with "
            f'outputs=("{ctx.path}:gradient",), or make it part of the loss'
        )


class FirstOrder(torch.autograd.Function):
    """A value whose gradient has no graph of its own: what asks for one (``create_graph=True``) is refused.

    It is no view (``value.view_as(value)``), on which autograd would allow no ``out[:, 0] = 0``; and it has the version of the
    value, so that the backward of what saved this sees such a change."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeProblem(
                "gradients of gradients (create_graph=True, a gradient penalty) are not computed by parallel programs, whose "
                "collectives have first derivatives only: run the penalty on the plain model"
            )
        return grad
