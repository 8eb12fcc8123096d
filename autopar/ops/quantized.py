"""Frozen linear layers whose weights are stored in 4 or 8 bits, of bitsandbytes (``Linear4bit``: NF4, FP4) and torchao
(``Int8Tensor``, weights alone), as modules that can be captured and sharded.

Their own storage is opaque: a tensor subclass, or packed elements in one column with scales in an attribute that is no buffer.
Here each is a frozen parameter whose dimension 0 is the outputs and whose dimension 1 is the inputs, in elements or in blocks, so
that tensor parallelism and ZeRO shard them as any other weight. The backward dequantizes again where the plan recomputes.
Neither package is imported: a model that needs one has imported it.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import CaptureError, StateError

_LEAST_BLOCK = 32
"""The smallest block of the kernels of bitsandbytes."""


def with_plain_storage(model: nn.Module) -> nn.Module:
    """The model itself, or where it has quantized linear layers a copy of its modules, with the same tensors, in which they are
    `Linear4bit` and `Linear8bit`. CaptureError for other quantized layers."""
    modules = dict(model.named_modules())
    plain = {path: made for path, module in modules.items() if (made := _plain(path, module)) is not None}
    if not plain:
        return model
    memo: dict[int, Any] = {id(each): each for each in (*model.parameters(), *model.buffers())}
    memo |= {id(modules[path]): made for path, made in plain.items()}
    copied: nn.Module = copy.deepcopy(model, memo)
    for path in plain:
        layer = copied.get_submodule(path.rpartition(".")[0])
        if hasattr(layer, "merge"):  # an adapted layer of peft, which would ask the weight for its state
            vars(layer)["merge"] = _refuse_merge
    return copied


def _refuse_merge(*_: object, **__: object) -> None:
    raise StateError(
        "adapters are not merged into quantized weights here: save them (save_pretrained), and merge them in one process, "
        "PeftModel.from_pretrained(model, folder).merge_and_unload()"
    )


def _plain(path: str, module: nn.Module) -> nn.Module | None:
    """The module in the place of a quantized one; None for any other."""
    layers, tensors = sys.modules.get("bitsandbytes.nn"), sys.modules.get("torchao.utils")
    own = dict(module.named_parameters(recurse=False))
    if layers is not None and isinstance(module, layers.Linear4bit):
        return Linear4bit(path, module)
    if layers is not None and isinstance(module, layers.Linear8bitLt):
        raise CaptureError(
            f"{path} is a Linear8bitLt of bitsandbytes, which rounds activations by the outliers of the whole batch: load the "
            "model in 4 bits (load_in_4bit=True), or its weights alone in int8 (Int8WeightOnlyConfig of torchao)"
        )
    if layers is not None and any(isinstance(each, layers.Params4bit | layers.Int8Params) for each in own.values()):
        raise CaptureError(f"{path} is a quantized {type(module).__name__} of bitsandbytes: leave it in bfloat16, or float32")
    quantized = [each for each in own.values() if tensors is not None and isinstance(each, tensors.TorchAOBaseTensor)]
    if not quantized:
        return None
    if type(module) is nn.Linear and Linear8bit.takes(quantized[0]):
        return Linear8bit(module)
    raise CaptureError(
        f"{path} has a weight of the type {type(quantized[0]).__name__} of torchao: quantize linear layers by "
        "Int8WeightOnlyConfig(), or in 4 bits by bitsandbytes (load_in_4bit=True)"
    )


def _frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that keeps its bits: floating-point numbers as int32, since a precision casts floating-point parameters."""
    return nn.Parameter(tensor.view(torch.int32) if tensor.is_floating_point() else tensor, requires_grad=False)


class Linear4bit(nn.Module):
    """A linear layer of 4-bit elements: `weight` has two elements a byte ``[n, k / 2]`` (uint8), `absmax` the scale of each block
    ``[n, k / block]`` (float32, as int32). Scales that were quantized too (double quantization) are float32 here."""

    def __init__(self, path: str, layer: Any) -> None:
        super().__init__()
        state, weight = layer.weight.quant_state, layer.weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute_dtype, self.quant_type, self.training = layer.compute_dtype, weight.quant_type, layer.training
        self.block = weight.blocksize
        while self.in_features % self.block:
            self.block //= 2  # blocks that straddle rows are several, with one scale
        if self.block < _LEAST_BLOCK:
            raise CaptureError(
                f"{path} has {self.in_features} inputs, which blocks of {_LEAST_BLOCK} elements do not divide: leave it in "
                f"bfloat16 (llm_int8_skip_modules=[{path.rpartition('.')[2]!r}])"
            )
        blocks = self.in_features // self.block
        if state is None and not weight.is_meta or getattr(state, "packing_format_for_cpu", False):
            raise CaptureError(
                f"{path} is not quantized yet, or was packed anew by an evaluation on this CPU: call model.to(device) before "
                "autopar.parallelize, and evaluate the parallel model"
            )
        if state is None:
            packed = torch.empty(self.out_features, self.in_features // 2, dtype=torch.uint8, device="meta")
            scales = torch.empty(self.out_features, blocks, device="meta")
        else:
            packed = weight.detach().as_subclass(Tensor).view(torch.uint8).view(self.out_features, -1)
            scales = _scales(state).repeat_interleave(weight.blocksize // self.block).view(self.out_features, blocks)
        self.weight, self.absmax, self.bias = _frozen(packed), _frozen(scales), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.compute_dtype or x.dtype
        weight = torch.ops.bitsandbytes.dequantize_4bit(
            self.weight, self.absmax.view(torch.float32), self.block, self.quant_type, (self.out_features, self.in_features),
            torch.float32 if dtype == torch.float64 else dtype,
        )  # fmt: skip
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), weight.to(dtype), bias).to(x.dtype)


def _scales(state: Any) -> Tensor:
    if not state.nested:
        return state.absmax  # type: ignore[no-any-return]
    inner = state.state2
    inner_scales = inner.absmax, inner.code, inner.blocksize
    found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(state.absmax, *inner_scales, torch.float32) + state.offset
    return found


class Linear8bit(nn.Module):
    """A linear layer of int8 elements: `weight` ``[n, k]``, and `scale` of each row ``[n]`` (float32, as int32)."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        stored: Any = layer.weight
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        rows = stored.scale.float().expand(self.out_features, 1).reshape(-1).contiguous()
        self.weight, self.scale, self.bias = _frozen(stored.qdata), _frozen(rows), layer.bias

    @staticmethod
    def takes(weight: Any) -> bool:
        """Whether it computes what `weight` does: int8, symmetric, one scale a row, and activations as they are."""
        return (
            type(weight).__name__ == "Int8Tensor" and weight.act_quant_kwargs is None and weight.act_pre_scale is None
            and weight.block_size[-1] == weight.shape[-1]
            and (weight.zero_point is None or not weight.zero_point.any())
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight.to(x.dtype)) * self.scale.view(torch.float32).to(x.dtype)
        return out if self.bias is None else out + self.bias
