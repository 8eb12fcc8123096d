"""Random numbers for DTensors (`nn.init.normal_(parameter)`, `torch.randn_like(p.grad)`, `F.dropout(p)`): those of the whole
tensor, of which each rank keeps its part. Shards differ, replicas agree, and the numbers are those that one process draws.

DTensor itself draws each shard from the generator of its rank: on CPUs ranks that are seeded alike get equal shards. All
stages of a pipeline draw the numbers of each parameter, so that their generators stay in step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from ..comm.agreement import bounds_on_ranks
from ..comm.heartbeat import glancing
from ..compat.autograd import has_data
from ..compat.dtensor import gathered, local_of, own_part, replicated
from ..compat.hooks import replaced, shard_operations
from ..compat.torch_operations import random_operations
from ..errors import RuntimeProblem
from ..state.stage_tensors import OnAnotherStage, holders_of, on_another_stage, pipeline_of

_OF_WHOLE_MATRICES = ("orthogonal_", "sparse_", "trunc_normal_", "eye_", "dirac_")
"""Functions of `nn.init` with operations that DTensor lacks (in-place transposition, writes by index, `out=`), or that draw into
further tensors."""
_DRAW = "a random draw for a sharded tensor"


def draw_whole_tensors() -> ExitStack:
    """Teach DTensor all random operations, and `nn.init` those of whole matrices, until the stack is closed."""
    hooks = ExitStack()
    hooks.enter_context(shard_operations(dict.fromkeys(random_operations(), _draw)))
    for name in _OF_WHOLE_MATRICES:
        hooks.enter_context(replaced(nn.init, name, _of_whole_matrix(getattr(nn.init, name))))
    return hooks


def _draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Run a random operation on whole tensors, and take this rank's part of what it gives and of what it writes."""
    values = [*args, *kwargs.values()]
    shards = [each for each in values if isinstance(each, DTensor)]
    if not has_data(local_of(shards[0])):
        raise RuntimeProblem(f"{op} of a tensor without data: draw the numbers on the devices of the run")
    written = {id(value) for argument, value in _bound(op, args, kwargs) if argument.alias_info and argument.alias_info.is_write}
    if any(placement.is_partial() for each in shards if id(each) in written for placement in each.placements):
        raise RuntimeProblem("a sum that is not reduced yet cannot be overwritten with random numbers: call .full_tensor() first")
    whole = {id(each): _whole(op, each, id(each) in written) for each in shards}

    def full(value: Any) -> Any:
        return whole[id(value)] if isinstance(value, DTensor) else value

    generator = next((each for each in values if isinstance(each, torch.Generator)), None)
    with glancing(_DRAW), _agreed(generator, shards[0]):
        results = op(*tree_map(full, args), **tree_map(full, kwargs))
    for each in shards:
        if id(each) in written:
            _keep(each, whole[id(each)])
    sources = {id(whole[id(each)]): each for each in shards}

    def own(result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        return sources[id(result)] if id(result) in sources else _sharded_like(result, shards)

    return type(results)(map(own, results)) if isinstance(results, (list, tuple)) else own(results)


def _bound(op: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments of the operation's schema with their values."""
    for position, argument in enumerate(op._schema.arguments):
        yield argument, args[position] if position < len(args) else kwargs.get(argument.name)


def draws_by_values(op: Any) -> bool:
    """Return whether the numbers that an operation draws depend on the values of its operands, and not on their shapes alone."""
    name: str = op._schema.name
    return torch.Tag.nondeterministic_seeded in op.tags and not op._schema.is_mutable and not name.endswith("_like")


def _whole(op: Any, value: DTensor, overwritten: bool) -> torch.Tensor:
    """The whole tensor; without its values where the operation does not read them."""
    name: str = op._schema.name
    reads = "dropout" in name or "rrelu" in name
    if (overwritten and not reads) or name.endswith("_like"):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=local_of(value).device)
    if isinstance(value, OnAnotherStage):
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return gathered(value).clone() if overwritten else gathered(value)


def _keep(value: DTensor, whole: torch.Tensor) -> None:
    """Write this rank's part of a whole tensor."""
    if not isinstance(value, OnAnotherStage):
        local_of(value).copy_(own_part(value, whole))


def _sharded_like(result: torch.Tensor, shards: list[DTensor]) -> DTensor:
    """A result of the shape of an argument is placed as that is, another one is replicated."""
    like = next((each for each in shards if each.shape == result.shape), None)
    mesh = shards[0].device_mesh
    away = next((each for each in shards if isinstance(each, OnAnotherStage)), None)
    if away is not None and (holders := holders_of(away)) is not None:
        return on_another_stage(result.shape, result.dtype, holders, stride=result.stride())
    if like is None or any(placement.is_partial() for placement in like.placements):
        return replicated(result, mesh)
    return DTensor.from_local(
        own_part(like, result), mesh, like.placements, run_check=False, shape=result.shape, stride=result.stride()
    )


@contextmanager
def _agreed(generator: torch.Generator | None, value: DTensor) -> Iterator[None]:
    """Let `generator` (None: torch's own of the device) have one state on all ranks that draw for `value`: that of the first
    rank, as scripts that seed each rank differently mean it. After it only a generator that agreed before has moved on, and that
    of the first rank."""
    device = local_of(value).device
    if generator is None:
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    own = generator.get_state()
    moves = _take_first_state(generator, own, value)
    try:
        yield
    finally:
        if not moves:
            generator.set_state(own)


def _take_first_state(generator: torch.Generator, own: torch.Tensor, value: DTensor) -> bool:
    """Set the generator to the state of the first rank, and return whether this rank's moves on with the draw. All ranks of the
    mesh, and of all stages of a pipeline, compare a hash first, since a state takes 5 kB."""
    number = int.from_bytes(hashlib.blake2b(bytes(own.tolist()), digest_size=7).digest(), "big")
    if ranks_agree(number, value, _DRAW, all_stages=True):
        return True
    state = own.to(local_of(value).device, copy=True)  # what a broadcast writes into
    for group in _groups(value, all_stages=True):
        dist.broadcast(state, group=group, group_src=0)
    generator.set_state(state.cpu())
    pipeline = pipeline_of(value)
    return not any((*(value.device_mesh.get_coordinate() or ()), pipeline and pipeline.mesh.pp.coordinate))


def ranks_agree(number: int, value: DTensor, doing: str, *, all_stages: bool = False) -> bool:
    """Return whether all ranks of the tensor's mesh have the same number, or those of all stages of a pipeline. All of them must
    call; `doing` names the work to a rank that waits for others here."""
    with glancing(doing):
        least, most = bounds_on_ranks(torch.tensor(number, device=local_of(value).device), _groups(value, all_stages))
        return bool(least == most)


def _groups(value: DTensor, all_stages: bool) -> list[dist.ProcessGroup]:
    mesh, pipeline = value.device_mesh, pipeline_of(value) if all_stages else None
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return groups if pipeline is None else [*groups, pipeline.mesh.group(pipeline.mesh.pp.name)]


def _of_whole_matrix(initialise: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function of `nn.init` that computes a DTensor's values as those of a whole matrix."""

    @wraps(initialise)
    def initialised(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        if not isinstance(tensor, DTensor):
            return initialise(tensor, *args, **kwargs)
        local, generator = local_of(tensor), kwargs.get("generator")
        whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=local.device)
        with glancing(_DRAW), _agreed(generator, tensor), torch.no_grad():
            _keep(tensor, initialise(whole, *args, **kwargs))
        return tensor

    return initialised
