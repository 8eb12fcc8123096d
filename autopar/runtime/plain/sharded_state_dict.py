"""The state dict of a parallel model, and what it is not: that of a plain model on a stage of a pipeline, or one that a rank may
save alone."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.autograd import has_data
from ..compat.dtensor import local_of
from ..compat.hooks import replaced
from ..errors import StateError
from .module_tree import TreeNode

_ONLY_SHARDS = (
    "what is saved here holds only this rank's shards (DTensors): save parallel.full_state(), which every rank calls (of an "
    "optimizer parallel.full_optimizer_state(optimizer)), or call parallel.save or torch.distributed.checkpoint on all ranks"
)


class ShardedStateDict(dict[str, Any]):
    """The state dict of a parallel model: DTensors, of which each rank holds its shards. Pickling it (torch.save) warns.
    `why_part`: why a plain model cannot load it; "" where it can."""

    def __init__(self, state: Any = (), why_part: str = "") -> None:
        super().__init__(state)
        self.why_part = why_part

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(_ONLY_SHARDS, stacklevel=4)
        return OrderedDict, (), None, None, iter(self.items())  # which torch.load reads with weights_only=True

    def __copy__(self) -> ShardedStateDict:
        return ShardedStateDict(self, self.why_part)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


def warn_of_shards() -> AbstractContextManager[None]:
    """Warn where a tensor of which this rank holds only a part is pickled, by whatever dict it comes."""

    usual: Any = DTensor.__reduce_ex__

    def reduce(self: DTensor, protocol: Any) -> Any:
        local = local_of(self)
        if local.numel() != self.numel() and has_data(local):
            warnings.warn(_ONLY_SHARDS, stacklevel=4)
        return usual(self, protocol)

    return replaced(DTensor, "__reduce_ex__", reduce)


def refuse_parts_of_states() -> AbstractContextManager[None]:
    """Refuse to load a state dict of a parallel model into a plain one where it has not all of it, in place of a list of keys."""
    usual = nn.Module.load_state_dict

    @wraps(usual)
    def load_state_dict(self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state_dict, ShardedStateDict) and state_dict.why_part and not isinstance(self, TreeNode):
            raise StateError(
                f"parallel.state_dict() {state_dict.why_part}: load parallel.full_state(), which every rank calls, into a plain "
                "model"
            )
        return usual(self, state_dict, *args, **kwargs)

    return replaced(nn.Module, "load_state_dict", load_state_dict)
