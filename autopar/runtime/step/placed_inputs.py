"""Inputs that are given as DTensors: their placements on model axes select the program, which takes each rank's
shard as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import BatchError


def model_placements(tensor: DTensor) -> dict[str, str]:
    """The placements on model axes that shard a tensor, by mesh axis."""
    names = tensor.device_mesh.mesh_dim_names or ()
    return {
        axis: f"S({place.dim % tensor.dim()})"
        for axis, place in zip(names, tensor.placements, strict=False)
        if isinstance(place, Shard) and axis != DATA_AXIS
    }


def local_shard(mesh: MeshHandle, name: str, tensor: DTensor, places: Mapping[str, str]) -> torch.Tensor:
    """This rank's shard of an input that is a DTensor, as the program takes it. BatchError for one on another mesh."""
    if tensor.device_mesh != mesh.device_mesh:
        raise BatchError(f"input {name} is a DTensor on another mesh: pass {name}.full_tensor()")
    wanted = [_placement(places.get(axis, "R")) if mesh.axis(axis).size > 1 else Replicate() for axis in mesh.axes]
    placed = tensor if list(tensor.placements) == wanted else tensor.redistribute(placements=wanted)
    return placed.to_local()


def plain_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs of a local batch. BatchError where one is a DTensor, of which nobody knows whether it is local or global."""
    placed = next((name for name, tensor in inputs.items() if isinstance(tensor, DTensor)), None)
    if placed is not None:
        raise BatchError(f"input {placed} is a DTensor in a local batch: pass the global batch, without local_batch")
    return inputs


def _placement(text: str) -> Replicate | Shard:
    return Shard(int(text[2:-1].split(",")[0])) if text.startswith("S") else Replicate()
