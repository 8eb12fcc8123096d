"""Workspace of an operation (beside operands, results and saved tensors), counted on meta or fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages that operations under this mode allocated, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def exclude(self, *tensors: torch.Tensor) -> None:
        """Excludes tensors that exist already."""
        self._seen.update(int(tensor.untyped_storage()._cdata) for tensor in tensors)

    def reset_peak(self) -> None:
        """Measures the peak from now on."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, key, storage.nbytes()).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
