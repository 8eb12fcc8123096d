"""Hooks of torch.distributed.checkpoint that torch 2.13.0 does not offer, as those of `hooks`: full states that rank 0 sends, and
shards of several boxes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from .dtensor import boxes
from .hooks import replaced


def around_full_states(context: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Enter `context` where torch.distributed.checkpoint makes a full state dict (of a model or of its optimizer). Seen on
    2.13.0: both go through this function."""
    outer: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")
    usual = outer._maybe_full_or_cpu_state_dict

    def make(state: Any, info: Any) -> Any:
        with context() if info.full_state_dict else nullcontext():
            return usual(state, info)

    return replaced(outer, "_maybe_full_or_cpu_state_dict", make)


def parts_of_full_states(has_part: Callable[[Any], bool]) -> AbstractContextManager[None]:
    """Let torch.distributed.checkpoint write into those tensors alone that have a part here, of the full state that rank 0 sends.
    Seen on 2.13.0, which writes into each through this function."""
    outer: Any = importlib.import_module("torch.distributed._state_dict_utils")
    usual = outer._distribute_tensors

    def distribute(local: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        for key in keys:
            if isinstance(pair := local.get(key), tuple) and not has_part(pair[0]):
                local[key] = pair[0]
        usual(local, keys, *args, **kwargs)

    return replaced(outer, "_distribute_tensors", distribute)


def boxes_in_checkpoints() -> ExitStack:
    """Tell torch.distributed.checkpoint that the local shard of a DTensor may be several separate boxes of the full tensor.

    On 2.13.0 DTensor names one box (the first offset, the local size) even for `_StridedShard`, whose elements lie apart: a fused
    query-key-value matrix sharded by heads would be saved at wrong offsets without an error. Shards of one box are untouched.
    """
    usual: Any = DTensor
    chunk_list = usual.__create_chunk_list__
    write_items = usual.__create_write_items__
    shard_of = usual.__get_tensor_shard__

    def create_chunk_list(self: Any) -> list[Any]:
        parts = boxes(self)
        return chunk_list(self) if len(parts) == 1 else [ChunkStorageMetadata(p.offsets, p.sizes) for p in parts]

    def create_write_items(self: Any, fqn: str, tensor: Any) -> list[Any]:
        parts = boxes(self)
        if len(parts) == 1:
            return write_items(self, fqn, tensor)  # type: ignore[no-any-return]
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        chunks = [TensorWriteData(ChunkStorageMetadata(p.offsets, p.sizes), properties, tensor.size()) for p in parts]
        return [WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data) for data in chunks]

    def get_tensor_shard(self: Any, index: Any) -> torch.Tensor:
        parts = boxes(self)
        if len(parts) == 1:
            return shard_of(self, index)  # type: ignore[no-any-return]
        box = next(p for p in parts if p.offsets == torch.Size(index.offset))
        local = self.to_local()
        for dim, (start, size) in enumerate(zip(box.starts, box.sizes, strict=True)):
            local = local.narrow(dim, start, size)
        return local  # type: ignore[no-any-return]

    hooks = ExitStack()
    for function in (create_chunk_list, create_write_items, get_tensor_shard):
        hooks.enter_context(replaced(DTensor, f"__{function.__name__}__", function))
    return hooks
