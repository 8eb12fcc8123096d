"""What `parallel(...)` returns: the class that the model returns, made again around the loss and the outputs of the program."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .apply import apply
from .collectives import convert
from .errors import RuntimeProblem
from .layout import cuts
from .mesh import DATA_AXIS, MeshHandle
from .module import Program

Form = Any
"""Nested words, as `ir.interface.Form`."""


def joined(program: Program, parts: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The outputs of a batch from those of its micro-batches: cut where the data axis cuts them, summed where it sums them."""
    return [
        _joined(where.get(DATA_AXIS, "R"), each)
        for where, each in zip(program.outputs.values(), zip(*parts, strict=True), strict=True)
    ]


def _joined(where: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 or where in ("R", "I"):
        return parts[-1]
    if where.startswith("S"):
        return torch.cat(list(parts), int(where[2:-1].split(",")[0]))
    stacked = torch.stack(list(parts))
    return stacked.amax(0) if "max" in where else stacked.amin(0) if "min" in where else stacked.sum(0)


def spread(program: Program, values: Sequence[torch.Tensor]) -> dict[str, DTensor | None]:
    """The outputs by path, as DTensors over the mesh of this rank's stage; None on stages that do not have them."""
    if not values:
        return dict.fromkeys(program.outputs)
    pairs = zip(program.outputs.items(), values, strict=True)
    return {path: _spread(path, local, where, program.mesh) for (path, where), local in pairs}


def _spread(path: str, local: torch.Tensor, where: Mapping[str, str], mesh: MeshHandle) -> DTensor:
    with torch.no_grad():
        local, where = _plain(local.detach(), dict(where), mesh)
    if torch.is_grad_enabled() and local.is_floating_point():
        local = apply(_OnlyTheLoss, path, local, torch.empty(0, requires_grad=True))
    places = [_placement(where.get(name, "R")) for name in mesh.axes]
    return DTensor.from_local(local, mesh.device_mesh, places, run_check=False)


def _plain(local: torch.Tensor, where: dict[str, str], mesh: MeshHandle) -> tuple[torch.Tensor, dict[str, str]]:
    """Without what DTensor has no simple word for: sums are taken, pieces of pieces (``S(2,3)``) are gathered."""
    for name, text in where.items():
        if text.startswith("P") and mesh.axis(name).size > 1:
            local = convert(local, mesh.axis(name), f"{text} -> R")
        if text.startswith("P"):
            where[name] = "R"
    shape = list(local.shape)
    for axis in mesh.model_axes:
        if (text := where.get(axis.name, "R")).startswith("S"):
            shape[int(text[2:-1].split(",")[0])] *= axis.size
    found = cuts(shape, where, mesh)
    first = next((number for number, cut in enumerate(found) if cut.parts > 1), len(found))
    for cut in reversed(found[first:]):
        local = convert(local, mesh.axis(cut.axis), f"S({cut.dim},{cut.parts}) -> R")
        where[cut.axis] = "R"
    return local, where


def _placement(text: str) -> Replicate | Shard | Partial:
    return Shard(int(text[2:-1].split(",")[0])) if text.startswith("S") else Replicate()


class _OnlyTheLoss(torch.autograd.Function):
    """An output takes no gradient: its value is detached, and a backward through it says so."""

    @staticmethod
    def forward(ctx: Any, path: str, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.path = path
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise RuntimeProblem(
            f"a gradient into the output {ctx.path}: only the loss takes gradients; detach() it, or make it part of the loss"
        )


# -- the user's class


def build(form: Form, loss: torch.Tensor, outputs: Mapping[str, Any]) -> Any:
    """The result in its form. A class that this process has not loaded becomes a plain namespace."""
    if form is None:
        return None
    kind, *rest = form
    if kind == "loss":
        return loss
    if kind == "output":
        return outputs[rest[0]]
    if kind == "constant":
        return rest[0]
    if kind in ("tuple", "list"):
        items = (build(each, loss, outputs) for each in rest[0])
        return tuple(items) if kind == "tuple" else list(items)
    fields = {key: build(each, loss, outputs) for key, each in rest[-1]}
    return fields if kind == "dict" else _made(_class(rest[0]), fields)


def plain(program: Program, loss: torch.Tensor, outputs: Mapping[str, Any]) -> Any:
    """Where nobody told the form: the loss, or a namespace of the loss and the outputs."""
    return SimpleNamespace(loss=loss, **outputs) if program.outputs else loss


def _class(name: str) -> type | None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def _made(cls: Any, fields: dict[str, Any]) -> Any:
    if cls is None:
        return SimpleNamespace(**fields)
    if issubclass(cls, Mapping):  # transformers' ModelOutput is a dataclass and a dictionary in one
        return cls(**fields) if hasattr(cls, "__dataclass_fields__") else cls(fields)
    if issubclass(cls, tuple):
        return cls(*fields.values())
    made = cls.__new__(cls)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made
