"""Gradients of a module that is parallel by hand, against differences of its loss, on ranks that do communicate.

No single process is needed: whatever ranks compute together, the gradient of a parameter is how much their loss changes with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from support.by_hand.cases import CASES
from support.by_hand.layers import MESH, VOCABULARY

STEP = 1e-5
RELATIVE = 1e-6


def wrong_gradients(name: str) -> list[str]:
    """The parameters of a case whose gradients on this rank are not those of the loss."""
    torch.manual_seed(0)
    module, inputs, options = CASES[name].factory()
    module.double()
    places, data = options["placements"], options.get("data", ("dp",))
    given = {key: _drawn(key, each, _places(key, places)) for key, each in inputs.items()}
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            parameter.copy_(_drawn(key, parameter, _places(key, places)))
    module(**given).backward()
    if options.get("after_backward") is not None:
        options["after_backward"]()
    wrong = []
    for key, parameter in module.named_parameters():
        if parameter.grad is None:
            continue
        direction = _drawn(f"direction of {key}", parameter, _places(key, places))
        found = torch.stack([(parameter.grad * direction).sum(), *_losses(module, given, parameter, direction)])
        every = [torch.empty_like(found) for _ in range(dist.get_world_size())]
        dist.all_gather(every, found)
        wrong += [key] if _differs(every, "S" in _places(key, places).get("tp", ""), bool(data)) else []
    return wrong


def _differs(every: list[Tensor], cut: bool, summed: bool) -> bool:
    """Whether the loss has another slope along the direction. `cut` parameters add up over the ranks of layers, and `summed`
    gradients over those of data, as the loss does."""
    dots, above, below = torch.stack(every).unflatten(0, tuple(MESH.values())).unbind(-1)
    slope = ((above - below) / (2 * STEP))[:, 0]
    slope = slope.sum() if summed else slope[0]
    own = dots.sum(1) if cut else dots
    own = own.sum(0) if summed else own
    return not torch.allclose(own, slope.expand_as(own), rtol=RELATIVE, atol=1e-8)


def _losses(module: Any, given: Mapping[str, Tensor], parameter: Tensor, direction: Tensor) -> list[Tensor]:
    out = []
    with torch.no_grad():
        for step in (STEP, -STEP):
            parameter.add_(direction, alpha=step)
            out.append(module(**given))
            parameter.sub_(direction, alpha=step)
    return out


def _places(name: str, places: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    return next((each for pattern, each in places.items() if fnmatch(name, pattern)), {})


def _seed(name: str, place: Mapping[str, str]) -> torch.Generator:
    """Equal on ranks that hold the same."""
    coordinates = dict(zip(MESH, divmod(dist.get_rank(), MESH["tp"]), strict=True))
    own = sorted((axis, coordinates[axis]) for axis, each in place.items() if each.startswith("S"))
    return torch.Generator().manual_seed(zlib.crc32(f"{name} {own}".encode()))


def _drawn(name: str, like: Tensor, place: Mapping[str, str]) -> Tensor:
    if not like.is_floating_point():
        return torch.randint(VOCABULARY, like.shape, generator=_seed(name, place))
    if name.endswith("mask"):  # another number of tokens on each rank
        return (torch.rand(like.shape, generator=_seed(name, place)) < 0.6).double()
    return torch.randn(like.shape, generator=_seed(name, place), dtype=torch.float64)
