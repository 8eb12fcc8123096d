"""Every storage that operations make while it is on, to see later which of them are alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """`made`: their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {StorageWeakRef(x.untyped_storage()) for x in tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in tensors(result):
            key = StorageWeakRef(x.untyped_storage())
            if key not in before:
                self.made.setdefault(key, x.untyped_storage().nbytes())
        return result


def tensors(value: Any) -> Iterator[Tensor]:
    """Those in nested arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)
