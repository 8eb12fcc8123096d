"""Tensors that the copy of a parallel model has in common with what is copied beside it: its optimizer has its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def share_copies(original: nn.Module, copied: nn.Module, memo: dict[int, Any]) -> None:
    """Let all that one `copy.deepcopy` copies hold the parameters, buffers and modules of the copied model. `memo` is of that
    call: what comes later takes them from it; what came before (``copy.deepcopy((optimizer, model))``) has others in their place,
    which are replaced in its containers and attributes."""
    others: dict[int, Any] = {}
    for old, new in _pairs(original, copied):
        if (other := memo.get(id(old), new)) is not new:
            others[id(other)] = new
        memo[id(old)] = new
    if not others:
        return
    for each in list(memo.values()):
        if isinstance(each, list):
            each[:] = [others.get(id(item), item) for item in each]
        elif isinstance(each, dict) and any(id(item) in others for item in (*each, *each.values())):
            items = [(others.get(id(key), key), others.get(id(value), value)) for key, value in each.items()]
            each.clear()
            each.update(items)
        elif isinstance(own := getattr(each, "__dict__", None), dict):
            own.update({name: others[id(value)] for name, value in own.items() if id(value) in others})


def _pairs(original: nn.Module, copied: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter, buffer and module of the original with that of the copy."""
    for named in ("named_modules", "named_parameters", "named_buffers"):
        new = dict(getattr(copied, named)(remove_duplicate=False))
        yield from ((old, new[name]) for name, old in getattr(original, named)(remove_duplicate=False) if name in new)
