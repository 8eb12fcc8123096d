"""Every private torch call of autopar, each with the torch version it was seen on. tests/runtime/test_compat.py tests each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.multiprocessing.reductions import StorageWeakRef

# -- functional collectives: torch.ops._c10d_functional, seen on 2.13.0. They return before the data has arrived; `wait` waits.
# On gloo 2.13.0 all of them work, bfloat16 sums, int64, bool gathers, reduce_scatter and all_to_all included.


def all_reduce(flat: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """`op` is sum, max or min."""
    result: torch.Tensor = torch.ops._c10d_functional.all_reduce(flat, op, group)
    return result


def all_gather(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """``[k] -> [size * k]``."""
    result: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(flat, size, group)
    return result


def reduce_scatter(flat: torch.Tensor, op: str, size: int, group: str) -> torch.Tensor:
    """``[size * k] -> [k]``."""
    result: torch.Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(flat, op, size, group)
    return result


def all_to_all(flat: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """``[size * k] -> [size * k]``, k elements to each rank."""
    splits = [flat.shape[0] // size] * size
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(flat, splits, splits, group)
    return result


def all_to_all_rows(rows: torch.Tensor, receive: list[int], send: list[int], group: str) -> torch.Tensor:
    """``[sum(send), ...] -> [sum(receive), ...]``: so many rows to and from each rank, or none. Seen on 2.13.0, on gloo too."""
    result: torch.Tensor = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, group)
    return result


def has_data(x: torch.Tensor) -> bool:
    """Whether the tensor has values: those of a dry run and of meta tensors have only shapes. Seen on 2.13.0."""
    return not (x.is_meta or isinstance(x, FakeTensor))


@contextmanager
def autograd_inside() -> Iterator[None]:
    """Inside the kernel of an operator autograd does not look; in this context it does. Seen on 2.13.0."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradOther", "AutogradFunctionality", "ADInplaceOrView"):
        left_out = left_out.remove(getattr(torch._C.DispatchKey, name))
    guard: Any = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out)
    with guard, torch.enable_grad():
        yield


def wait(raw: torch.Tensor) -> torch.Tensor:
    """The tensor, arrived."""
    result: torch.Tensor = torch.ops._c10d_functional.wait_tensor(raw)
    return result


def alias(x: torch.Tensor) -> torch.Tensor:
    """A new tensor over the same data, for the result of an autograd.Function.

    Compiled code that returns a view of something else that it returns makes the view anew outside, and so leaves out the
    backward of the function. Seen on 2.13.0; what ``_unsafe_view`` makes has no base.
    """
    if not torch.compiler.is_compiling():
        return x.view_as(x)
    result: torch.Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return result


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs `callback` when the backward that is running now ends. Seen on 2.13.0 (FSDP2 and DDP use the same)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def in_backward() -> bool:
    """Whether this thread runs inside a backward. Seen on 2.13.0."""
    return bool(torch._C._current_graph_task_id() != -1)


def sole_holder(tensor: torch.Tensor) -> bool:
    """Whether no other tensor has this one's storage. Seen on 2.13.0: one count is the tensor's, one the look's own."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


def storage_key(tensor: torch.Tensor) -> object:
    """Equal for tensors of one storage, and for no others as long as the key lives. Seen on 2.13.0: a weak reference, which keeps
    the address of a freed storage from being used again."""
    return StorageWeakRef(tensor.untyped_storage())


def forget_order(root: Any) -> None:
    """Clears the order of forwards by which FSDP2 prefetches in the backward. It does so itself only after a last backward
    (``set_is_last_backward``). Before the first forward there is none. Seen on 2.13.0."""
    order: list[Any] = getattr(root._get_fsdp_state()._comm_ctx, "post_forward_order", [])
    for group in order:
        group._post_forward_indices.clear()
    order.clear()


def reduce_now(module: Any) -> None:
    """What FSDP2 does with a module's gradients behind its backward, at once. Seen on 2.13.0 (2.11 has one group a module).

    It refuses to reduce gradients of which only some were added up before, in the reduction's dtype: here all are in it.
    """
    for group in _param_groups(module._get_fsdp_state()):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
        group.post_backward()


def _param_groups(state: Any) -> list[Any]:
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def finish_backward(root: Any) -> None:
    """What FSDP2 does at the end of a backward that began in `root`: `reduce_now` for each module that it was not done for, then
    waits as ``set_is_last_backward`` says. Seen on 2.13.0."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def strided_shard(dim: int, parts: int) -> Any:
    """DTensor's placement that reads `dim` as (parts, rest) and cuts the rest. Seen on 2.13.0."""
    return _StridedShard(dim, split_factor=parts)


def is_strided(placement: Any) -> bool:
    """Whether `placement` came from `strided_shard`."""
    return isinstance(placement, _StridedShard)


def own_store() -> Any:
    """The store of the default group on a connection of its own, for another thread. Seen on 2.13.0."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()


def group_name(device_mesh: Any, axis: str) -> str:
    """The name under which functional collectives know the group of a mesh axis. Seen on 2.13.0."""
    name: str = device_mesh.get_group(axis).group_name
    return name


def save_strided_pieces() -> None:
    """Teaches torch.distributed.checkpoint that the local part of a DTensor may be several pieces of the whole.

    On 2.13.0 DTensor names one chunk (the first offset, the local size) even for `_StridedShard`, whose pieces lie apart: a fused
    query-key-value matrix cut by heads would be saved at wrong places without an error. DTensors in one piece are untouched.
    """
    if getattr(DTensor.__create_chunk_list__, "autopar", False):
        return
    original: Any = DTensor
    chunk_list = original.__create_chunk_list__
    write_items = original.__create_write_items__
    shard_of = original.__get_tensor_shard__

    def create_chunk_list(self: Any) -> list[Any]:
        pieces = _pieces(self)
        return chunk_list(self) if len(pieces) == 1 else [ChunkStorageMetadata(p.offsets, p.sizes) for p in pieces]

    def create_write_items(self: Any, fqn: str, tensor: Any) -> list[Any]:
        pieces = _pieces(self)
        if len(pieces) == 1:
            return write_items(self, fqn, tensor)  # type: ignore[no-any-return]
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        chunks = [TensorWriteData(ChunkStorageMetadata(p.offsets, p.sizes), properties, tensor.size()) for p in pieces]
        return [WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data) for data in chunks]

    def get_tensor_shard(self: Any, index: Any) -> torch.Tensor:
        pieces = _pieces(self)
        if len(pieces) == 1:
            return shard_of(self, index)  # type: ignore[no-any-return]
        piece = next(p for p in pieces if p.offsets == torch.Size(index.offset))
        local = self.to_local()
        for dim, (start, size) in enumerate(zip(piece.starts, piece.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local  # type: ignore[no-any-return]

    create_chunk_list.autopar = True  # type: ignore[attr-defined]
    patched: Any = DTensor
    patched.__create_chunk_list__ = create_chunk_list
    patched.__create_write_items__ = create_write_items
    patched.__get_tensor_shard__ = get_tensor_shard


class _Piece(NamedTuple):
    """`sizes` elements of the whole at `offsets`; they begin at `starts` in the local tensor."""

    offsets: torch.Size
    sizes: torch.Size
    starts: tuple[int, ...]


def _pieces(tensor: DTensor) -> list[_Piece]:
    """The pieces of a DTensor's local part that are contiguous in the whole; one empty piece for an empty part."""
    runs = [_runs(tensor, dim) for dim in range(tensor.dim())]
    if not any(is_strided(placement) for placement in tensor.placements) or not all(runs):
        zeros = (0,) * tensor.dim()
        return [_Piece(torch.Size(zeros), tensor._local_tensor.shape, zeros)]
    return [
        _Piece(torch.Size(offset for offset, _, _ in box), torch.Size(size for _, size, _ in box), tuple(at for _, _, at in box))
        for box in product(*runs)
    ]


def _runs(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """(offset in the whole, length, start in the local tensor) of each run of consecutive indices along `dim`."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    indices = torch.arange(tensor.shape[dim])
    for axis, placement in enumerate(tensor.placements):
        size, coordinate = tensor.device_mesh.size(axis), coordinates[axis]
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            indices = indices.view(int(placement.split_factor), size, -1)[:, coordinate].reshape(-1)
        elif isinstance(placement, Shard) and placement.dim == dim:
            chunks = indices.chunk(size)
            indices = chunks[coordinate] if coordinate < len(chunks) else indices[:0]
    breaks = (indices[1:] != indices[:-1] + 1).nonzero().flatten().tolist()
    starts = [0, *(at + 1 for at in breaks)] if len(indices) else []
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), end - start, start) for start, end in zip(starts, ends, strict=False)]
