"""The user's arguments as the inputs of a program: bound by name, moved to the device, and checked against the plan.

Placements of DTensors on model axes select the program. So do arguments that are no tensors, as text: equal for equal values on
every rank.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey

from ..comm.conversions import dtensor_placement, shard_of
from ..comm.convert import convert
from ..compat.autograd import apply
from ..device.mesh import DATA_AXIS, MeshHandle
from ..errors import BatchError
from ..module import Program
from .arguments import attributes_of, flatten_arguments
from .outputs import FirstOrder
from .results import refuse_left_out

REPLAN = "plan again with other example inputs"


def bind_arguments(program: Program, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs by name. BatchError, which names the argument, if the call differs from the one that was planned."""
    values = _arguments(program, args, keywords)
    wanted = {name: name for name in program.input_placements} | {name: path for path, name in program.arguments.items()}
    constants = {**program.constants, **program.defaults}
    paths = set(wanted.values())
    missing = [path for path in (*wanted.values(), *program.constants) if path not in values]
    unknown = sorted(values.keys() - paths - constants.keys())
    if unknown or missing:
        problem = f"misses {', '.join(missing)}" if missing else f"has unplanned {', '.join(unknown)}"
        raise BatchError(f"the batch {problem}; this plan takes {', '.join((*wanted.values(), *program.constants))} ({REPLAN})")
    for path, text in constants.items():
        value = values.get(path)
        if path in values and text and constant_text(value) != text and text not in _twins(values, value):
            shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else constant_text(value)
            raise BatchError(f"argument {path} is {shown}, the plan is for {text}: pass that, or {REPLAN}")
    return _checked(
        program,
        {
            name: _batch_first(program, name, path, _tensor(program, path, values[path], name in program.differentiable_inputs))
            for name, path in wanted.items()
        },
        wanted,
    )


def same_text(path: str) -> str:
    """Return the words for an argument that is the tensor at another path: a constant, of a forward that asks (``x is y``)."""
    return f"the tensor of {path}"


def _twins(values: Mapping[str, Any], value: Any) -> Iterator[str]:
    """Yield the words for the same tensor at other paths."""
    yield from (same_text(path) for path, each in values.items() if each is value)


def _batch_first(program: Program, name: str, path: str, tensor: torch.Tensor) -> torch.Tensor:
    dim = program.batch_dims.get(name, 0)
    if dim >= tensor.dim() and dim:
        raise BatchError(f"input {path} of shape {tuple(tensor.shape)} has no dimension {dim}, where its batch was planned")
    if dim and isinstance(tensor, DTensor):
        raise BatchError(f"input {path} is a DTensor, and has its batch at dimension {dim}: pass its full_tensor()")
    return tensor.movedim(dim, 0) if dim else tensor


class LocalBatch(dict[str, Any]):
    """A batch of which each data-parallel rank passes its own part, made by `Parallel.local_batch`. `times`: as many of them make
    the global batch."""

    def __init__(self, batch: Mapping[str, Any], times: int) -> None:
        super().__init__(batch)
        self.times = times


class NamedBatch(dict[str, torch.Tensor]):
    """A global batch by the names of the program's inputs, as an exported folder has it, with the batch at dimension 0; constants
    are those of the plan."""


def bind_named_batch(program: Program, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of a batch that is given by their names."""
    names = tuple(program.input_placements)
    if set(batch) != set(names):
        different = ", ".join(sorted(set(batch) ^ set(names)))
        raise BatchError(f"the batch and the plan differ in {different}; this program takes {', '.join(names)}")
    return _checked(program, {name: _tensor(program, name, batch[name], False) for name in names}, {name: name for name in names})


def local_inputs(program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the global inputs, which are sharded on the data axis only, but for DTensors."""
    return {name: _local_input(program, name, tensor) for name, tensor in inputs.items()}


def _local_input(program: Program, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return _with_gradient(program, name, tensor)
    if isinstance(tensor, DTensor):
        return local_shard(program.mesh, name, tensor, program.input_placements[name])
    shard, dp = shard_of(program.input_placements[name].get(DATA_AXIS, "R")), program.mesh.dp
    if shard is None or dp.size == 1:
        return tensor
    dim, _ = shard
    if tensor.dim() <= dim or not dp.divides(tensor.shape[dim]):
        raise BatchError(
            f"input {name} of shape {tuple(tensor.shape)} does not divide over {dp.size} data-parallel ranks; "
            f"pass a batch whose size is a multiple of {dp.size}"
        )
    return dp.part(tensor, dim)


def _with_gradient(program: Program, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part; its backward gives every rank the gradient of the whole input."""
    mesh = program.mesh
    for axis in mesh.axes:
        text = program.input_placements[name].get(axis, "R")
        shard = shard_of(text)
        if shard is not None and not mesh.axis(axis).divides(tensor.shape[shard[0]]):
            raise BatchError(
                f"input {name} of shape {tuple(tensor.shape)} does not divide over {axis}={mesh.axis(axis).size}; "
                f"pass a batch whose size is a multiple of {mesh.axis(axis).size}"
            )
        tensor = convert(tensor, mesh.axis(axis), f"I -> {text}")
    return apply(FirstOrder, tensor)  # type: ignore[no-any-return]


# -- the call


def arguments_by_name(program: Program, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name. BatchError where there are too many, or one is given twice."""
    names = program.positional or tuple(program.input_placements)
    if len(args) > len(names):
        raise BatchError(f"{len(args)} arguments by position, the model takes {len(names)}: {', '.join(names)}")
    placed = dict(zip(names, args, strict=False))
    twice = sorted(placed.keys() & keywords.keys())
    if twice:
        raise BatchError(f"argument {twice[0]} is given by position and by name: pass it once")
    return {**placed, **keywords}


def _arguments(program: Program, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return every leaf of the arguments by its path. An argument that is None but was captured as a tensor counts as left
    out."""
    leaves, _ = flatten_arguments(arguments_by_name(program, args, keywords))
    values = {".".join(map(path_word, keys)): leaf for keys, leaf in leaves}
    constants = {**program.constants, **program.defaults}
    return {path: leaf for path, leaf in values.items() if leaf is not None or path in constants}


def path_word(key: Any) -> str:
    if isinstance(key, MappingKey):
        return str(key.key)
    if isinstance(key, SequenceKey):
        return str(key.idx)
    return str(key.name) if isinstance(key, GetAttrKey) else str(key)


def _tensor(program: Program, path: str, value: Any, flows: bool) -> torch.Tensor:
    if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled() and not flows:
        raise BatchError(
            f"argument {path} requires a gradient, and this program computes none into it: pass {path}.detach(), or make what "
            "computes it part of the model"
        )
    if isinstance(value, DTensor) and value.requires_grad and torch.is_grad_enabled():  # a parameter, or made of one
        value = value.full_tensor()
    try:
        return torch.as_tensor(value).to(program.mesh.device, non_blocking=True)
    except (TypeError, ValueError, RuntimeError):
        raise BatchError(
            f"argument {path} is a {type(value).__name__}, the plan is for a tensor: pass one, or {REPLAN}"
        ) from None


def _checked(program: Program, tensors: dict[str, torch.Tensor], paths: Mapping[str, str]) -> dict[str, torch.Tensor]:
    for name, wanted in program.input_dtypes.items():
        dtype = str(tensors[name].dtype).removeprefix("torch.")
        if dtype != wanted:
            raise BatchError(f"input {paths[name]} is {dtype}, the plan is for {wanted}: cast it, or plan again")
    for name, planned in program.input_shapes.items():
        shape = tuple(tensors[name].shape)
        if len(shape) != len(planned) or any(want not in (None, size) for want, size in zip(planned, shape, strict=True)):
            wanted = ", ".join("batch" if size is None else str(size) for size in planned)
            raise BatchError(f"input {paths[name]} has shape {shape}, the plan is for ({wanted}): pad it, or plan again")
    _same_batch(program, tensors, paths)
    return tensors


def _same_batch(program: Program, tensors: Mapping[str, torch.Tensor], paths: Mapping[str, str]) -> None:
    """Inputs that are sharded along dimension 0 have one size there, if the plan says so."""
    first = ""
    for name, planned in program.input_shapes.items():
        if planned[:1] == (None,) and program.input_placements[name].get(DATA_AXIS, "R") == "S(0)":
            if first and tensors[name].shape[0] != tensors[first].shape[0]:
                raise BatchError(
                    f"input {paths[name]} has {tensors[name].shape[0]} examples, {paths[first]} has {tensors[first].shape[0]}: "
                    f"pass one batch (if {paths[name]} or {paths[first]} has none: plan with example inputs of another number)"
                )
            first = first or name


def check_branches(program: Program, tensors: Mapping[str, torch.Tensor], times: int) -> None:
    """BatchError for a batch of a size for which the model takes other branches. `times` such batches make the global one."""
    for name, planned in program.input_shapes.items():
        if planned[:1] == (None,) and not program.takes_batch(size := tensors[name].shape[0] * times):
            raise BatchError(
                f"for a batch of {size} the model's forward takes another branch (an `if` on the size of the batch) than this "
                f"program, which has no model to capture: pass a batch of the size that it was exported for, or {REPLAN}"
            )


_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def constant_text(value: object) -> str:
    """Return ``repr`` of a plain value; else the type's name and a digest of what the object holds, so that an object that was
    changed is another constant."""
    if isinstance(value, torch.Tensor):
        return "a tensor"  # which is no constant
    refuse_left_out(value)
    if _is_plain(value):
        return repr(value)
    return f"{type(value).__name__}_{hashlib.blake2b(_held(value, ()).encode(), digest_size=4).hexdigest()}"


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str)) or type(value).__module__ == "torch"


def _held(value: Any, around: tuple[int, ...]) -> str:
    """All that an object holds. `around`: the objects that it is a part of."""
    if _is_plain(value) and not isinstance(value, torch.Tensor):
        return repr(value)
    if id(value) in around:
        return f"<{around[::-1].index(id(value))}>"
    inside = (*around, id(value))
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value  # a DTensor
        return f"tensor {value.dtype} {tuple(value.shape)} {'' if value.is_meta else local.tolist()}"
    if isinstance(value, Mapping):
        parts = [f"{_held(key, inside)}: {_held(each, inside)}" for key, each in value.items()]
    elif isinstance(value, Set):
        parts = sorted(_held(each, inside) for each in value)
    elif isinstance(value, (list, tuple)):
        parts = [_held(each, inside) for each in value]
    elif isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    else:
        own = attributes_of(value)
        parts = [_held(own, inside) if own else _ADDRESS.sub("", repr(value))]
    return f"{type(value).__qualname__}({', '.join(parts)})"


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
    texts = {axis: places.get(axis, "R") if mesh.axis(axis).size > 1 else "R" for axis in mesh.launched_axes}
    wanted = [dtensor_placement(text) for text in texts.values()]
    placed = tensor if list(tensor.placements) == wanted else tensor.redistribute(placements=wanted)
    return placed.to_local()


def plain_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs of a local batch. BatchError where one is a DTensor, of which nobody knows whether it is local or global."""
    placed = next((name for name, tensor in inputs.items() if isinstance(tensor, DTensor)), None)
    if placed is not None:
        raise BatchError(f"input {placed} is a DTensor in a local batch: pass the global batch, without local_batch")
    return inputs
