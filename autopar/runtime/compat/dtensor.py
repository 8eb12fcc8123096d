"""DTensor: the table of its operations, its strided placements, its local shards as boxes of the full tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only


def operations_of_shards() -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """Return DTensor's table of operations that it does not dispatch itself; it calls their entries with the operation, its
    arguments and its keywords. Seen on 2.13.0."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def usual_operation(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation as DTensor does without an entry in `operations_of_shards`."""
    if is_elementwise(op) and _placed_alike(args, kwargs):
        return _on_parts(op, args, kwargs)
    handlers = operations_of_shards()
    own = handlers.pop(op, None)
    try:
        return without_overrides(op, *args, **kwargs)  # asked before: a `Gradient` takes what it does not know for a sum
    finally:
        if own is not None:
            handlers[op] = own


@cache
def is_elementwise(op: Any) -> bool:
    """Return whether an operation makes of each element one element, new or in the place of the first operand's. (`torch.equal`
    has the tag too.)"""
    schema = op._schema
    if [str(each.type) for each in schema.returns] != ["Tensor"] or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(each.is_out for each in schema.arguments):
        return False
    return torch.Tag.pointwise in op.tags or op.overloadpacket is torch.ops.aten.zeros_like


def _placed_alike(args: Any, kwargs: Any) -> bool:
    """Return whether all tensors of a call have the shape, layout and placements of the first, and no sum is left to do."""
    first: Any = args[0]
    if not isinstance(first, DTensor) or any(each.is_partial() for each in first.placements):
        return False
    tensors = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.Tensor)]
    return all(isinstance(each, DTensor) and each._spec == first._spec for each in tensors)


def _on_parts(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an element-wise operation on this rank's parts of tensors that are placed alike. DTensor does so too, once it has
    worked out the placements of each operation and shape: milliseconds each, in a first step of an optimizer."""
    first: DTensor = args[0]
    parts = (each._local_tensor if isinstance(each, DTensor) else each for each in args)
    result = op(*parts, **{name: local_of(each) if isinstance(each, DTensor) else each for name, each in kwargs.items()})
    if op._schema.is_mutable:
        return first
    return over_local(DTensor, first, result) if result.dtype == first.dtype else placed_like(result, first)


def without_overrides(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch without the ``__torch_function__`` of subclasses. Seen on 2.13.0."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def strided_shard(dim: int, parts: int) -> Any:
    """DTensor's placement that reads `dim` as (parts, rest) and shards the rest. Seen on 2.13.0."""
    return _StridedShard(dim, split_factor=parts)


def is_strided(placement: Any) -> bool:
    """Return whether `placement` came from `strided_shard`."""
    return isinstance(placement, _StridedShard)


def over_local(kind: type[Any], value: DTensor, local: torch.Tensor | None = None) -> Any:
    """An instance of `kind`, a subclass of DTensor, over the data of `value`, or over `local` placed as `value` is. (A
    ``DTensor.from_local`` for each gradient of a step takes ten times as long.) Seen on 2.13.0."""
    return torch.Tensor._dtensor__new__(kind, value._local_tensor if local is None else local, value._spec, requires_grad=False)


def local_of(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or any other tensor itself, without a node of autograd. Seen on 2.13.0."""
    return value._local_tensor if isinstance(value, DTensor) else value.detach()


def largest_part(value: torch.Tensor) -> int:
    """Return the elements of the largest part that a rank has of a tensor; the same on all ranks."""
    if not isinstance(value, DTensor):
        return value.numel()
    sharded = zip(value.placements, value.device_mesh.shape, strict=True)
    return -(-value.numel() // prod(size for placement, size in sharded if placement.is_shard() or is_strided(placement)))


def replace_local(value: torch.Tensor, local: torch.Tensor) -> None:
    """Put other memory under this rank's part of a DTensor, or under any other tensor, whoever holds it. Seen on 2.13.0."""
    if isinstance(value, DTensor):
        value._local_tensor = local
    else:
        value.data = local


def replicated(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor that all ranks of a mesh have alike as a DTensor."""
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)


def with_local(kind: type[Any], local: torch.Tensor, mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int]) -> Any:
    """An instance of `kind` (DTensor, or a subclass), replicated over the mesh, whose part on this rank is `local`, on its own
    device, and of any shape: `DTensor.from_local` moves it, and takes an empty shape for none. Seen on 2.13.0."""
    with torch.inference_mode(False):
        spec = _replicated_spec(mesh, id(mesh), tuple(shape), tuple(stride), local.dtype)
        return torch.Tensor._dtensor__new__(kind, local, spec, requires_grad=False)


@lru_cache(maxsize=2**12)
def _replicated_spec(
    mesh: DeviceMesh, number: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """The specification of a replicated tensor. `number`: the mesh's, since equal ones may have other process groups."""
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)


def placed_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Return the tensor of the shape and placements of `like` whose part on this rank is `local`."""
    return DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def gathered(value: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a whole, or any other tensor itself, without a node of autograd."""
    here = isinstance(value, DTensor) and value._spec.is_replicated() and type(value._local_tensor) is torch.Tensor
    if here and not value.__dict__:  # nothing there says how it is read: `DTensor.full_tensor` takes 0.1 ms
        return local_of(value).detach()
    detached = value.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def or_whole(run: Callable[[Any, Any, Any], Any], op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation by DTensor's rule, or on whole tensors where it has none for this call, which it says on all ranks (and so
    torch says there what is wrong with the call itself). Seen on 2.13.0."""
    try:
        return run(op, args, kwargs)
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "Sharding propagation failed" not in str(error):
            raise
    return on_whole_tensors(op, args, kwargs)


def on_whole_tensors(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on whole tensors. All ranks have the results alike."""
    mesh = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, DTensor)).device_mesh
    args, kwargs = tree_map_only(DTensor, gathered, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda result: replicated(result, mesh), op(*args, **kwargs))


def view_in_place(op: Any, args: Any, kwargs: Any) -> None:
    """Make a DTensor a view of itself (``x.unsqueeze_(0)``), as the operation without its underscore does. Seen on 2.13.0, whose
    own rules leave the shape that autograd knows as it was."""
    view = _out_of_place(op)(*args, **kwargs)
    args[0]._local_tensor, args[0]._spec = view._local_tensor, view._spec
    with no_dispatch():  # what the tensor itself says of its shape
        op(*args, **kwargs)


def reshape_in_place(value: DTensor, op: Any, args: Any, kwargs: Any) -> None:
    """Do `view_in_place` of a DTensor without elements here, whose shape alone changes."""
    view = _out_of_place(op)(meta_like(value), *args[1:], **kwargs)
    value._spec = with_local(DTensor, value._local_tensor, value.device_mesh, view.shape, view.stride())._spec
    with no_dispatch():
        op(*args, **kwargs)


def _out_of_place(op: Any) -> Any:
    return getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_"))


def has_empty_part(value: DTensor) -> bool:
    """Return whether a rank has no elements of a tensor that has some. All ranks know."""
    sizes = tuple(value.device_mesh.shape)
    last = [size - 1 for size in sizes]
    return any(extent and not _indices_of(extent, dim, value.placements, sizes, last) for dim, extent in enumerate(value.shape))


def own_part(like: DTensor, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is placed as `like` is, in memory of its own where it is a part. Of a sum that is not
    reduced yet the first rank has all."""
    coordinates = like.device_mesh.get_coordinate() or ()
    others = [place for place, at in zip(like.placements, coordinates, strict=True) if at]
    part = torch.zeros_like(whole) if any(place.is_partial("sum") for place in others) else whole
    for dim in range(like.dim()):
        indices = _indices(like, dim)
        if len(indices) < like.shape[dim]:
            part = part.index_select(dim, indices.to(whole.device))
    return part


class MatrixPart(NamedTuple):
    """The rows and columns of a matrix that one rank has."""

    rows: slice | torch.Tensor
    columns: slice | torch.Tensor
    shape: tuple[int, int]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a matrix."""
        return whole[self.rows][:, self.columns]

    def put(self, whole: torch.Tensor, values: torch.Tensor) -> None:
        """Write the values of this part into a matrix."""
        if isinstance(self.rows, slice):
            whole[self.rows][:, self.columns] = values
        else:
            whole[self.rows[:, None], torch.arange(whole.shape[1])[self.columns]] = values


def matrix_part(like: DTensor, coordinates: Sequence[int]) -> MatrixPart:
    """The part that the rank at these coordinates has of a matrix placed as `like` is."""
    return _matrix_part(like.shape, like.placements, tuple(like.device_mesh.shape), tuple(coordinates))


@lru_cache(maxsize=2**14)
def _matrix_part(shape: Sequence[int], placements: Sequence[Any], sizes: Sequence[int], coordinates: Sequence[int]) -> MatrixPart:
    rows, columns = (_indices_of(shape[dim], dim, placements, sizes, coordinates) for dim in (0, 1))
    return MatrixPart(_as_slice(rows), _as_slice(columns), (len(rows), len(columns)))


def _as_slice(indices: Sequence[int]) -> slice | torch.Tensor:
    """Return ascending indices as a slice where they are consecutive."""
    if not indices:
        return slice(0, 0)
    start, end = indices[0], indices[-1] + 1
    return slice(start, end) if end - start == len(indices) else torch.tensor(indices)


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh in order, also in a dry run, where the tensor that names them is none of the fake ones. Seen on
    2.13.0."""
    with unset_fake_temporarily():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def outside_of_fakes() -> AbstractContextManager[Any]:
    """A context outside of a dry run's fake tensors. Seen on 2.13.0."""
    return unset_fake_temporarily()


def meta_like(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape without values, also in a dry run, where those that are made are fake. Seen on 2.13.0."""
    with outside_of_fakes():
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def whole(value: DTensor) -> DTensor:
    """Return `value` with its partial placements reduced."""
    if not any(placement.is_partial() for placement in value.placements):
        return value
    return value.redistribute(placements=[Replicate() if each.is_partial() else each for each in value.placements])


class Box(NamedTuple):
    """A box of `sizes` elements of the full tensor at `offsets`, which lies at `starts` in the local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    starts: tuple[int, ...]


def boxes(tensor: DTensor) -> list[Box]:
    """The boxes of the full tensor that a DTensor's local shard consists of; one empty box for an empty shard."""
    runs = [_runs(tensor, dim) for dim in range(tensor.dim())]
    if not any(is_strided(placement) for placement in tensor.placements) or not all(runs):
        zeros = (0,) * tensor.dim()
        return [Box(torch.Size(zeros), tensor._local_tensor.shape, zeros)]
    return [
        Box(torch.Size(offset for offset, _, _ in box), torch.Size(size for _, size, _ in box), tuple(at for _, _, at in box))
        for box in product(*runs)
    ]


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """(offset in the full tensor, length, start in the local tensor) of each run of consecutive indices along `dim`."""
    return [(first, count, at) for at, first, count in consecutive_runs(_indices(tensor, dim))]


def consecutive_runs(indices: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """The runs of consecutive indices: where each begins in the list, the first index, and how many."""
    breaks = ((indices[1:] - indices[:-1]) != 1).nonzero().flatten() + 1
    begins = [0, *breaks.tolist(), len(indices)]
    for begin, end in zip(begins, begins[1:], strict=False):
        if end > begin:
            yield begin, int(indices[begin]), end - begin


def _indices(tensor: DTensor, dim: int) -> torch.Tensor:
    """The indices along `dim` of the full tensor that this rank has."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    indices = _indices_of(tensor.shape[dim], dim, tensor.placements, tuple(tensor.device_mesh.shape), coordinates)
    return torch.tensor(indices, dtype=torch.int64)


def _indices_of(
    extent: int, dim: int, placements: Sequence[Any], sizes: Sequence[int], coordinates: Sequence[int]
) -> Sequence[int]:
    """The indices along `dim` of a full tensor that the rank at these coordinates of a mesh of these sizes has. (Without tensors,
    which a dry run would make fake.)"""
    indices: Sequence[int] = range(extent)
    for placement, size, coordinate in zip(placements, sizes, coordinates, strict=True):
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            part = len(indices) // parts
            length = -(-part // size)
            starts = [each * part + min(coordinate * length, part) for each in range(parts)]
            ends = [min(start + length, (each + 1) * part) for each, start in enumerate(starts)]
            own = [indices[start:end] for start, end in zip(starts, ends, strict=True)]
            indices = own[0] if parts == 1 else [index for each in own for index in each]
    return indices
