"""Tensors that autograd saves of one operation for its backward, and the operation's workspace: observed by running it in torch
on meta tensors under saved-tensor hooks.

Storage identity tells operands, results and extras apart. Kernels depend on the device: attention is observed for CPUs and
declared for GPUs, where flash attention saves q, k, v, the mask, its result and one float32 log-sum-exp per query, and its
backward sums the gradient of q in float32 (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.cost_models.tensors import operation_functions
from autopar.cost_models.tensors.transient_memory import LiveBytes
from autopar.ir import dims
from autopar.ir.graph import Arg, DType, Node, Ref, Symbol, Value
from autopar.operations.experts import ExpertShapes
from autopar.operations.table import operation

_SAMPLE_BATCH = 8
"""A batch that usual divisors of the batch accept; ratios do not depend on it."""


@dataclass(frozen=True, slots=True)
class SavedTensors:
    """Tensors that an operation saves for its backward, and its workspace.

    operands, results: which of them are saved.
    extra_ratio: bytes of other saved tensors, as a multiple of the bytes of `extra_reference`: the index of an operand, or
        ``-1 - index`` of a result.
    forward_workspace_ratio, backward_workspace_ratio: bytes that the operation allocates while it runs, beside operands, results,
        their gradients and saved tensors, as multiples of the bytes of `workspace_reference` (an index as above).
    known: false where torch could not run the operation: then everything is taken to be saved.
    """

    operands: tuple[bool, ...]
    results: tuple[bool, ...]
    extra_ratio: float = 0.0
    extra_reference: int = 0
    known: bool = True
    forward_workspace_ratio: float = 0.0
    backward_workspace_ratio: float = 0.0
    workspace_reference: int = 0


def saved_tensors(node: Node, values: Mapping[str, Value], kind: str = "cuda") -> SavedTensors:
    """Return the tensors that `node` saves for its backward on a device of this kind."""
    operands = tuple(values[name] for name in node.operands())
    nothing = SavedTensors((False,) * len(operands), (False,) * len(node.outputs))
    if node.no_grad or not any(v.differentiable for v in operands) or not any(v.differentiable for v in node.outputs):
        return nothing
    return _saved_by(_Signature.of(node, operands), kind)


@dataclass(frozen=True, slots=True)
class _Signature:
    """An operation without the names of its operands: the key of the cache."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[tuple[dims.Shape, str, bool], ...]
    results: tuple[tuple[dims.Shape, str, bool], ...]

    @staticmethod
    def of(node: Node, operands: tuple[Value, ...]) -> _Signature:
        def anonymous(arg: Arg) -> Arg:
            if isinstance(arg, Ref):
                return Ref("")
            return tuple(map(anonymous, arg)) if isinstance(arg, tuple) else arg

        def key(value: Value) -> tuple[dims.Shape, str, bool]:
            return value.shape, value.dtype, value.differentiable

        kwargs = tuple((name, anonymous(arg)) for name, arg in node.kwargs)
        return _Signature(
            node.op, tuple(map(anonymous, node.args)), kwargs, tuple(map(key, operands)), tuple(map(key, node.outputs))
        )


@lru_cache(maxsize=8192)
def _saved_by(signature: _Signature, kind: str) -> SavedTensors:
    record = operation(signature.op)
    if record.experts:
        return _experts(signature)
    if record.attention and (kind != "cpu" or signature.op.startswith("ap.")):
        return _attention(signature)
    try:
        if record.attention:
            with FakeTensorMode():
                return _observed(signature, "cpu")
        return _observed(signature)
    except Exception:  # noqa: BLE001  whatever torch refuses (a custom operation, a form without a meta kernel) is taken to save all
        saved = tuple(differentiable for *_, differentiable in signature.operands)
        return SavedTensors(saved, (True,) * len(signature.results), known=False)


def _bytes(shape: dims.Shape, dtype: str) -> int:
    return prod(dims.shape_at(shape, _SAMPLE_BATCH)) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _experts(signature: _Signature) -> SavedTensors:
    shapes = [dims.shape_at(shape, _SAMPLE_BATCH) for shape, *_ in signature.operands]
    sizes = ExpertShapes.of(signature.op, signature.args, dict(signature.kwargs), shapes)
    return (_megatron_experts if operation(signature.op).published else _moe_experts)(signature, sizes)


def _megatron_experts(signature: _Signature, sizes: ExpertShapes) -> SavedTensors:
    """Megatron-Core's: tokens and scores; and of each token copy the input of the up product (one byte per element in float8),
    its output, and the input of the down product, unless it is recomputed."""
    product = 0.5 if operation(signature.op).float8 else 1.0
    kept = 0 if dict(signature.kwargs).get("recompute_activation") else sizes.down
    ratio = sizes.top_k * (product * (sizes.hidden + kept) + sizes.up) / sizes.hidden
    return SavedTensors((True, True, False, False), (False,), ratio, 0)


def _moe_experts(signature: _Signature, sizes: ExpertShapes) -> SavedTensors:
    """The program's (runtime/ops/experts): all operands but the expert ids; of each token copy its source and destination index,
    and the output of the up product.

    Workspace: the forward holds of each copy a token and its result, or the inner activations; the backward all steps of the gate
    with their gradients, or the gradient of the up product and two of a token.
    """
    (x, dtype, _), _, _, _, _, *biases = signature.operands
    copies, width, wide, inner = sizes.copies, sizes.hidden, sizes.up, sizes.down
    unit = copies * _bytes((1,), dtype) / _bytes(x, dtype)
    extra = unit * wide + 2 * copies * _bytes((1,), "int64") / _bytes(x, dtype)
    saved = (True, False, True, True, True, *(True for _ in biases))
    forward, backward = max(2 * width, 2 * inner, width + inner), max(2 * inner + 2 * wide, 4 * inner + width, wide + 2 * width)
    return SavedTensors(
        saved, (False,), extra, 0, forward_workspace_ratio=unit * forward, backward_workspace_ratio=unit * backward
    )


def _attention(signature: _Signature) -> SavedTensors:
    (shape, dtype, _) = signature.operands[0]
    logsumexp = 4 * prod(dims.shape_at(shape, _SAMPLE_BATCH)[:-1])
    ratio = logsumexp / _bytes(shape, dtype)
    in_float = 4 / torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    forward, backward = 0.0, in_float + ratio
    if operation(signature.op).float32_sums:  # the result, and the gradients of all three
        others = sum(_bytes(other, kind) for other, kind, _ in signature.operands[1:3]) / _bytes(shape, dtype)
        forward, backward = in_float + ratio, in_float * (1 + others) + ratio
    saved = (True,) * len(signature.operands)
    return SavedTensors(saved, (True,), ratio, 0, forward_workspace_ratio=forward, backward_workspace_ratio=backward)


def _observed(signature: _Signature, device: str = "meta") -> SavedTensors:
    tensors = [
        torch.empty(dims.shape_at(shape, _SAMPLE_BATCH), dtype=getattr(torch, dtype), device=device, requires_grad=differentiable)
        for shape, dtype, differentiable in signature.operands
    ]
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(_storage(tensor), tensor.detach())
        return tensor

    rest = iter(tensors)
    args = [_concrete(arg, rest) for arg in signature.args]
    kwargs = {name: _concrete(arg, rest) for name, arg in signature.kwargs}
    live = LiveBytes()
    live.exclude(*tensors)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), live:
        returned = _function(signature.op)(*args, **kwargs)
    outputs = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    after, peak = live.now, live.peak
    operands = tuple(saved.pop(_storage(tensor), None) is not None for tensor in tensors)
    results = tuple(saved.pop(_storage(output), None) is not None for output in outputs)
    extra = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    saved.clear()
    del returned
    backward = _backward_bytes(tensors, outputs, live)
    results = (*results, *(False,) * (len(signature.results) - len(results)))
    ratio, reference = _extra_ratio(signature, extra)
    forward_ratio, backward_ratio, largest = _workspace_ratios(signature, peak - after, backward)
    return SavedTensors(
        operands=operands,
        results=results,
        extra_ratio=ratio,
        extra_reference=reference,
        known=True,
        forward_workspace_ratio=forward_ratio,
        backward_workspace_ratio=backward_ratio,
        workspace_reference=largest,
    )


def _backward_bytes(tensors: list[torch.Tensor], outputs: list[torch.Tensor], live: LiveBytes) -> int:
    """The workspace of the backward, beside the gradients that it returns."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    ends = [output for output in outputs if output.requires_grad]
    gradients = [torch.empty_like(end) for end in ends]
    live.exclude(*gradients)
    live.reset_peak()
    before = live.now
    with live:
        found = torch.autograd.grad(ends, wanted, gradients, allow_unused=True, retain_graph=True)
    returned = {_storage(each): each.untyped_storage().nbytes() for each in found if each is not None}
    passed_on = sum(returned.get(_storage(each), 0) for each in gradients)
    return max(0, live.peak - before - sum(returned.values()) + passed_on)


def _workspace_ratios(signature: _Signature, forward: int, backward: int) -> tuple[float, float, int]:
    """Both as multiples of the largest operand or result."""
    sizes = {index: _bytes(shape, dtype) for index, (shape, dtype, _) in enumerate(signature.operands)}
    sizes |= {-1 - index: _bytes(shape, dtype) for index, (shape, dtype, _) in enumerate(signature.results)}
    largest = max(sizes, key=lambda index: sizes[index])
    whole = max(1, sizes[largest])
    return max(0, forward) / whole, backward / whole, largest


def _extra_ratio(signature: _Signature, extra_bytes: int) -> tuple[float, int]:
    """Extras as a multiple of the largest result, or of the largest operand where the results are smaller than the extras; of the
    first operand where they are its copy in float8."""
    if not extra_bytes:
        return 0.0, 0
    results = [_bytes(shape, dtype) for shape, dtype, _ in signature.results]
    operands = [_bytes(shape, dtype) for shape, dtype, _ in signature.operands]
    if operation(signature.op).float8:
        return extra_bytes / operands[0], 0
    index = max(range(len(results)), key=results.__getitem__)
    if results[index] >= extra_bytes:
        return extra_bytes / results[index], -1 - index
    index = max(range(len(operands)), key=operands.__getitem__)
    return extra_bytes / operands[index], index


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _concrete(arg: Arg, tensors: Any) -> Any:
    match arg:
        case Ref():
            return next(tensors)
        case Symbol():
            return dims.size_at(arg.dim, _SAMPLE_BATCH)
        case DType():
            return getattr(torch, arg.name)
        case tuple():
            return [_concrete(item, tensors) for item in arg]
        case _:
            return arg


def _function(op: str) -> Any:
    namespace, name, *overload = op.split(".")
    found = getattr(operation_functions, name, None) if namespace == "ap" else None
    found = found or getattr(getattr(torch.ops, namespace), name)
    return getattr(found, overload[0]) if overload else found
