"""The dtypes of a step: what a user may write for them, and what of a model follows from them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.ir.plan import REDUCTIONS, Precision

PrecisionLike = str | torch.dtype | Precision | MixedPrecisionPolicy

_FLOAT8 = ("fp8", "float8")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "f32": "float32", "fp64": "float64", "f64": "float64"}


def precision_of(precision: PrecisionLike | None, model: nn.Module) -> Precision:
    """Return the precision that was asked for; by default the dtype that most of the model's floating-point parameters have:
    the others are stored as they are."""
    if isinstance(precision, Precision):
        return precision
    if isinstance(precision, MixedPrecisionPolicy):
        return _precision_of_policy(precision, model)
    if precision is None:
        counts: dict[torch.dtype, int] = {}
        for parameter in filter(torch.is_floating_point, model.parameters()):
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
        own = str(max(counts, key=lambda dtype: counts[dtype], default=torch.float32)).removeprefix("torch.")
        return Precision(own, own)
    name = _dtype_name(precision)
    if name in _FLOAT8:
        return Precision("bfloat16", "float32", float8=True)
    if name.startswith(("float8", "mxfp8", "fp8")):
        raise AutoparError(
            f'precision {precision!r} is not known: "fp8" is bf16 with products in float8 (torchao, dynamic scaling)'
        )
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise AutoparError(f"dtype {precision!r} is not known: write float32, bf16, fp16 or float64")
    return Precision(name, "float32" if name in ("bfloat16", "float16") else name)


def _dtype_name(precision: object) -> str:
    """The name of a dtype that is said as text (``bf16``) or as torch's (``torch.bfloat16``)."""
    if isinstance(precision, torch.dtype):
        return str(precision).removeprefix("torch.")
    if not isinstance(precision, str):
        raise AutoparError(f'precision={repr(precision)[:60]} is no dtype: write "bf16", torch.bfloat16 or a Precision')
    return _DTYPES.get(precision, precision).removeprefix("torch.")


def check_float8_devices(precision: Precision, cluster: Cluster) -> None:
    """Raise AutoparError where products are in float8 on a device that has none, or beside another dtype."""
    if not precision.float8:
        return
    if precision.compute != "bfloat16":
        raise AutoparError(
            f"float8 products are beside bfloat16, not {precision.compute}: write Precision('bfloat16', float8=True)"
        )
    for device in (cluster.device, *(group.device for group in cluster.groups)):
        if "float8" not in dict(device.peak):
            raise AutoparError(f'{device.name} has no float8 products: take precision "bf16"')


def _precision_of_policy(policy: MixedPrecisionPolicy, model: nn.Module) -> Precision:
    """Return the precision of FSDP2's policy, whose gradients are summed in `param_dtype` unless it has a `reduce_dtype`.
    AutoparError where it asks for what a program does not do."""
    own = precision_of(None, model).master
    compute, reduce = (str(each).removeprefix("torch.") if each else "" for each in (policy.param_dtype, policy.reduce_dtype))
    if policy.output_dtype is not None:
        raise AutoparError(f"MixedPrecisionPolicy(output_dtype={policy.output_dtype}) is not known: cast what the model returns")
    return with_reduction(Precision(compute or own, own), reduce or compute)


def with_reduction(precision: Precision, dtype: str) -> Precision:
    """`precision` with gradients that are summed in `dtype` (empty: as it says)."""
    name = _DTYPES.get(dtype, dtype)
    if name and name not in REDUCTIONS:
        raise AutoparError(f"reduce dtype {dtype[:40]!r} is not known: write one of {', '.join(REDUCTIONS)}")
    return replace(precision, reduce="" if name == precision.master else name) if name else precision


def compute_dtype_of(precision: Precision, model: nn.Module) -> str | None:
    """The dtype in which parameters and inputs enter the forward; None where a model of several dtypes keeps its own."""
    own = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    usual = precision_of(None, model)
    kept = len(own) > 1 and (precision.compute, precision.master) == (usual.compute, usual.master)
    return None if kept else precision.compute
