"""What an operation holds while it runs, beside operands, results and what is kept: counted on tensors without data."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations under it made and that still live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._seen: set[int] = set()

    def known(self, *tensors: torch.Tensor) -> None:
        """Leaves tensors out that were there before."""
        self._seen.update(int(tensor.untyped_storage()._cdata) for tensor in tensors)

    def restart(self) -> None:
        """Counts the most from now on."""
        self.most = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.most = max(self.most, self.now)
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
