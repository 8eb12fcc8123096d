"""Linear layers in float8: torchao's products with dynamic scaling of whole tensors (seen on torchao 0.18, torch 2.13).

The scale of a tensor is that of this rank's shard, as in torchao under FSDP. torchao is imported at the first call, and nothing
else here needs it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

MULTIPLE = 16
"""The divisor of all sizes of a product; torchao pads the inner ones (tokens, in the gradient of the weight)."""

_LEAST_CAPABILITY = (8, 9)


def float8_problem(device_type: str) -> str:
    """Return the obstacle to float8 products on this machine, and its remedy; empty where there is none."""
    if find_spec("torchao") is None:
        return 'float8 products are those of torchao, which is not installed: pip install torchao, or take precision "bf16"'
    if device_type == "cuda" and torch.cuda.get_device_capability() < _LEAST_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f'{name} has no float8 products (compute capability 8.9 and later have): take precision "bf16"'
    return ""


def linear_float8_dynamic(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``F.linear`` whose product, and those of its gradients, are in float8: ``x [..., k]``, ``weight [n, k]``."""
    function, products, config = _torchao()
    out: torch.Tensor = function.apply(x, weight.t(), products, config)
    return out if bias is None else out + bias.to(out.dtype)


@cache
def _torchao() -> tuple[Any, Any, Any]:
    """The autograd function of torchao's `Float8Linear`, with the two configurations that it takes."""
    layers = import_module("torchao.float8.float8_linear")
    config = import_module("torchao.float8.config").Float8LinearConfig(pad_inner_dim=True)
    layer = layers.Float8Linear(MULTIPLE, MULTIPLE, bias=False, device="meta", config=config)
    return layers.matmul_with_hp_or_float8_args, layer.linear_mm_config, config
