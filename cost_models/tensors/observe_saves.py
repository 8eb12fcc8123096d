"""What autograd saves of an operation, and its workspace, observed by running it in torch on meta tensors under hooks.

Storage identity tells operands, results and extras apart.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost_models.tensors import operation_functions
from autopar.cost_models.tensors.saved_tensors import SAMPLE_BATCH, Signature, saved_bytes
from autopar.ir import dims
from autopar.ir.graph import Arg, DType, Ref, Symbol
from autopar.ir.plan_file.document import SavedTensors
from autopar.operations.table import operation


def observe(signature: Signature) -> SavedTensors:
    """Return what was observed; attention runs on fake tensors of a CPU, whose kernel it is."""
    try:
        if operation(signature.op).attention:
            with FakeTensorMode():
                return _saved_on("cpu", signature)
        return _saved_on("meta", signature)
    except Exception:  # noqa: BLE001  whatever torch refuses (a custom operation, a form without a meta kernel) is taken to save all
        saved = tuple(differentiable for *_, differentiable in signature.operands)
        return SavedTensors(saved, (True,) * len(signature.results), known=False)


def _saved_on(device: str, signature: Signature) -> SavedTensors:
    tensors = [
        torch.empty(dims.shape_at(shape, SAMPLE_BATCH), dtype=getattr(torch, dtype), device=device, requires_grad=differentiable)
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
        found = torch.autograd.grad(ends, wanted, gradients, allow_unused=True)
    returned = {_storage(each): each.untyped_storage().nbytes() for each in found if each is not None}
    passed_on = sum(returned.get(_storage(each), 0) for each in gradients)
    return max(0, live.peak - before - sum(returned.values()) + passed_on)


def _workspace_ratios(signature: Signature, forward: int, backward: int) -> tuple[float, float, int]:
    """Both as multiples of the largest operand or result."""
    sizes = {index: saved_bytes(shape, dtype) for index, (shape, dtype, _) in enumerate(signature.operands)}
    sizes |= {-1 - index: saved_bytes(shape, dtype) for index, (shape, dtype, _) in enumerate(signature.results)}
    largest = max(sizes, key=lambda index: sizes[index])
    whole = max(1, sizes[largest])
    return max(0, forward) / whole, backward / whole, largest


def _extra_ratio(signature: Signature, extra_bytes: int) -> tuple[float, int]:
    """Extras as a multiple of the largest result, or of the largest operand where the results are smaller than the extras; of the
    first operand where they are its copy in float8."""
    if not extra_bytes:
        return 0.0, 0
    results = [saved_bytes(shape, dtype) for shape, dtype, _ in signature.results]
    operands = [saved_bytes(shape, dtype) for shape, dtype, _ in signature.operands]
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
            return arg.at(SAMPLE_BATCH)
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


class LiveBytes(TorchDispatchMode):
    """Bytes of live storages that operations under this mode allocated, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def exclude(self, *tensors: torch.Tensor) -> None:
        """Excludes tensors that exist already."""
        self._seen.update(int(tensor.untyped_storage()._cdata) for tensor in tensors)

    def reset_peak(self) -> None:
        """Measures the peak from now on."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
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
