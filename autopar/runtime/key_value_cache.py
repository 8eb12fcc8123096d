"""The key-value cache of a decoder as the model of Hugging Face transformers sees it while it is captured: without writes.

A call without a position starts a cache: it returns the keys and values of its tokens. A call with one takes them at a fixed
capacity, and writes one token at that position, so that one program computes every token. What lies behind the position is
hidden by the model's own causal mask. All tensors are ``[batch, heads, tokens, head size]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .errors import RuntimeProblem

USE_CACHE = "use_cache"

CACHE = "key-value cache"
"""The word in a result's form for a cache of transformers, which is made while the model runs and is no output."""

INSTEAD_OF_CACHE = "decode with parallel.generate(...), which has a cache of its own, or pass whole sequences (use_cache=False)"


def is_library_cache(item: object) -> bool:
    """Return whether an object is a cache of Hugging Face transformers."""
    kinds = type(item).__mro__
    return any(kind.__module__.split(".")[0] == "transformers" and kind.__name__.endswith("Cache") for kind in kinds)


class Written:
    """Says of an argument that the call changes it, and that no copy of it will do."""


_WRITTEN = Written()


class KeyValueCache:
    """The `keys` and `values` of each layer; `position` (int64, no dimension) is that of the token which the call computes.

    RuntimeProblem, while capturing, where a model uses it as something else than keys and values of every layer.
    """

    def __init__(
        self,
        keys: Sequence[torch.Tensor] = (),
        values: Sequence[torch.Tensor] = (),
        position: torch.Tensor | None = None,
    ) -> None:
        _registered()
        self.keys, self.values, self.position = list(keys), list(values), position

    @property
    def capacity(self) -> int:
        """Tokens that it has room for; 0 before the first call."""
        return self.keys[0].shape[2] if self.keys else 0

    # -- what models call

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """The keys and values of a layer with those of this call's tokens."""
        if key.dim() != 4 or value.dim() != 4:
            raise RuntimeProblem(f"layer {layer_idx} keeps keys of shape {tuple(key.shape)}, not [batch, heads, tokens, size]")
        if self.position is not None:
            self.keys[layer_idx] = _with_token(self.keys[layer_idx], key, self.position)
            self.values[layer_idx] = _with_token(self.values[layer_idx], value, self.position)
        elif layer_idx == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        else:
            raise RuntimeProblem(f"layer {layer_idx} is the number {len(self.keys)} of those that keep keys and values")
        return self.keys[layer_idx], self.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return 0 if self.position is None else self.position

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Keys that attention sees, and the position of the first one."""
        return (query_length if self.position is None else self.capacity), 0

    @property
    def is_compileable(self) -> bool:
        return self.position is not None

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)


def _with_token(past: torch.Tensor, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    if token.shape[2] != 1 or token.dtype != past.dtype:
        raise RuntimeProblem(f"a token of {token.dtype} and shape {tuple(token.shape)} for a cache of {past.dtype}")
    here = torch.arange(past.shape[2], device=past.device) == position
    return torch.where(here[None, None, :, None], token, past)


@cache
def _registered() -> None:
    """Make a cache a tree of its tensors, as an argument is taken apart."""
    names = ("keys", "values", "position")

    def children(each: KeyValueCache) -> list[Any]:
        return [*(getattr(each, name) for name in names), _WRITTEN]

    register_pytree_node(
        KeyValueCache,
        lambda each: (children(each), None),
        lambda found, _: KeyValueCache(*list(found)[:3]),
        serialized_type_name="autopar.KeyValueCache",
        flatten_with_keys_fn=lambda each: (
            [(GetAttrKey(name), child) for name, child in zip((*names, "kind"), children(each), strict=True)],
            None,
        ),
    )
