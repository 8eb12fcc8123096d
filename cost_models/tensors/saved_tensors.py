"""Tensors that autograd saves of one operation for its backward, and the operation's workspace: as a plan's file says
(`saves_from_file`), else observed in torch (`observed_saves`), which is imported for the first one.

Kernels depend on the device: attention is observed for CPUs and declared for GPUs, where flash attention saves q, k, v, the mask,
its result and one float32 log-sum-exp per query, and its backward sums the gradient of q in float32 (FlashAttention-2, arXiv
2307.08691, algorithm 2).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import prod
from types import MappingProxyType

from autopar.cost_models.tensors.sizes import itemsize
from autopar.ir import dims
from autopar.ir.graph import Arg, Graph, Node, Ref, Value, map_arguments
from autopar.ir.plan_file.document import SavedTensors
from autopar.operations.experts import ExpertShapes
from autopar.operations.table import operation

SAMPLE_BATCH = 8
"""A batch that usual divisors of the batch accept; ratios do not depend on it."""

_KNOWN: ContextVar[Mapping[str, SavedTensors]] = ContextVar("known saves", default=MappingProxyType({}))


def saved_tensors(node: Node, values: Mapping[str, Value], kind: str = "cuda") -> SavedTensors:
    """Return the tensors that `node` saves for its backward on a device of this kind."""
    operands = tuple(values[name] for name in node.operands())
    nothing = SavedTensors((False,) * len(operands), (False,) * len(node.outputs))
    if node.no_grad or not any(v.differentiable for v in operands) or not any(v.differentiable for v in node.outputs):
        return nothing
    signature = Signature.of(node, operands)
    if _is_declared(signature, kind):
        return _declared(signature)
    known = _KNOWN.get()
    return known.get(signature.digest) or _observed(signature) if known else _observed(signature)


def observed_saves(graph: Graph, kind: str) -> dict[str, SavedTensors]:
    """Return what was observed of the operations of a graph, for the file of a plan on devices of this kind."""
    out = {}
    for block in graph.blocks:
        values = block.values()
        for node in block.nodes:
            signature = Signature.of(node, tuple(values[name] for name in node.operands()))
            if not _is_declared(signature, kind):
                out[signature.digest] = saved_tensors(node, values, kind)
    return out


@contextmanager
def saves_from_file(table: Mapping[str, SavedTensors]) -> Iterator[None]:
    """Take what autograd saves from a plan's file, so that reading the plan needs no torch; what is not in it is observed."""
    token = _KNOWN.set(table)
    try:
        yield
    finally:
        _KNOWN.reset(token)


@dataclass(frozen=True, slots=True)
class Signature:
    """An operation without the names of its operands: the key of what was observed."""

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    operands: tuple[tuple[dims.Shape, str, bool], ...]
    results: tuple[tuple[dims.Shape, str, bool], ...]

    @staticmethod
    def of(node: Node, operands: tuple[Value, ...]) -> Signature:
        def anonymous(arg: Arg) -> Arg:
            return Ref("") if isinstance(arg, Ref) else arg

        def key(value: Value) -> tuple[dims.Shape, str, bool]:
            return value.shape, value.dtype, value.differentiable

        same = map_arguments(anonymous, node)
        return Signature(node.op, same.args, same.kwargs, tuple(map(key, operands)), tuple(map(key, node.outputs)))

    @property
    def digest(self) -> str:
        """The key in the file of a plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def _is_declared(signature: Signature, kind: str) -> bool:
    record = operation(signature.op)
    return record.experts or (record.attention and (kind != "cpu" or signature.op.startswith("ap.")))


@lru_cache(maxsize=8192)
def _declared(signature: Signature) -> SavedTensors:
    return _experts(signature) if operation(signature.op).experts else _attention(signature)


@lru_cache(maxsize=8192)
def _observed(signature: Signature) -> SavedTensors:
    observe = import_module("autopar.cost_models.tensors.observe_saves")  # it imports torch, which takes two seconds
    saved: SavedTensors = observe.observe(signature)
    return saved


def saved_bytes(shape: dims.Shape, dtype: str) -> int:
    """Return the bytes of a tensor at the sample batch."""
    return dims.numel(shape, SAMPLE_BATCH) * itemsize(dtype)


def _experts(signature: Signature) -> SavedTensors:
    shapes = [dims.shape_at(shape, SAMPLE_BATCH) for shape, *_ in signature.operands]
    sizes = ExpertShapes.of(signature.op, signature.args, dict(signature.kwargs), shapes)
    return (_megatron_experts if operation(signature.op).published else _moe_experts)(signature, sizes)


def _megatron_experts(signature: Signature, sizes: ExpertShapes) -> SavedTensors:
    """Megatron-Core's: tokens and scores; and of each token copy the input of the up product (one byte per element in float8),
    its output, and the input of the down product, unless it is recomputed."""
    product = 0.5 if operation(signature.op).float8 else 1.0
    kept = 0 if dict(signature.kwargs).get("recompute_activation") else sizes.down
    ratio = sizes.top_k * (product * (sizes.hidden + kept) + sizes.up) / sizes.hidden
    return SavedTensors((True, True, False, False), (False,), ratio, 0)


def _moe_experts(signature: Signature, sizes: ExpertShapes) -> SavedTensors:
    """The program's (runtime/ops/experts): all operands but the expert ids; of each token copy its source and destination index,
    and the output of the up product.

    Workspace: the forward holds of each copy a token and its result, or the inner activations; the backward all steps of the gate
    with their gradients, or the gradient of the up product and two of a token.
    """
    (x, dtype, _), _, _, _, _, *biases = signature.operands
    copies, width, wide, inner = sizes.copies, sizes.hidden, sizes.up, sizes.down
    unit = copies * saved_bytes((1,), dtype) / saved_bytes(x, dtype)
    extra = unit * wide + 2 * copies * saved_bytes((1,), "int64") / saved_bytes(x, dtype)
    saved = (True, False, True, True, True, *(True for _ in biases))
    forward, backward = max(2 * width, 2 * inner, width + inner), max(2 * inner + 2 * wide, 4 * inner + width, wide + 2 * width)
    return SavedTensors(
        saved, (False,), extra, 0, forward_workspace_ratio=unit * forward, backward_workspace_ratio=unit * backward
    )


def _attention(signature: Signature) -> SavedTensors:
    (shape, dtype, _) = signature.operands[0]
    logsumexp = 4 * prod(dims.shape_at(shape, SAMPLE_BATCH)[:-1])
    ratio = logsumexp / saved_bytes(shape, dtype)
    in_float = 4 / itemsize(dtype)
    forward, backward = 0.0, in_float + ratio
    if operation(signature.op).float32_sums:  # the result, and the gradients of all three
        others = sum(saved_bytes(other, kind) for other, kind, _ in signature.operands[1:3]) / saved_bytes(shape, dtype)
        forward, backward = in_float + ratio, in_float * (1 + others) + ratio
    saved = (True,) * len(signature.operands)
    return SavedTensors(saved, (True,), ratio, 0, forward_workspace_ratio=forward, backward_workspace_ratio=backward)
