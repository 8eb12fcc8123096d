"""Tensors that a forward keeps for the next one: buffers that it assigns to, those that share memory with others, and attributes
that are no buffers."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node

from autopar.errors import CaptureError


@contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[None]:
    """Let each buffer have, at the end of the forward inside, what it assigns to the buffer's name (``self.mean = 0.9 * self.mean
    + ...``). `torch.export` does so for buffers of the outermost module alone, and drops all others (seen on 2.13.0)."""
    named = [(path, module) for path, module in model.named_modules()]
    before = [
        (path, module, name, buffer) for path, module in named for name, buffer in module._buffers.items() if buffer is not None
    ]
    yield
    changed = [each for each in before if each[1]._buffers.get(each[2]) is not each[3]]
    # copies first: a new value may be another buffer, as it was before
    values = [_value(module, f"{path}.{name}".lstrip("."), name, buffer) for path, module, name, buffer in changed]
    for (_, module, name, buffer), value in zip(changed, values, strict=True):
        buffer.copy_(value)
        module._buffers[name] = buffer


def _value(module: nn.Module, place: str, name: str, buffer: Tensor) -> Tensor:
    value = module._buffers.get(name)
    if value is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        found = "None" if value is None else f"{value.dtype} {list(value.shape)}"
        raise CaptureError(
            f"the forward assigns {found} to the buffer {place} of {buffer.dtype} {list(buffer.shape)}: keep its shape and "
            "dtype, or return the tensor"
        )
    # without need no operation outside of the module: a block that writes its buffer knows what it may not recompute
    return (value.detach() if value.requires_grad else value).clone()


def refuse_shared_buffers(model: nn.Module, program: ExportedProgram) -> None:
    """CaptureError where the forward writes a buffer whose memory another buffer or a parameter has too."""
    tensors = dict([*model.named_buffers(), *model.named_parameters()])
    for name in (each.removeprefix("module.") for each in program.graph_signature.buffers_to_mutate.values()):
        own = tensors.get(name)
        other = next(
            (each for each, tensor in tensors.items() if own is not None and own is not tensor and _overlap(own, tensor)), None
        )
        if other is not None:
            raise CaptureError(
                f"the forward writes to the buffer {name}, whose memory {other} shares, which would not see it: register the "
                "whole tensor, and slice it in the forward"
            )


def refuse_states(program: ExportedProgram, states: Mapping[tuple[str, str], tuple[tuple[Tensor, ...], str, bool]]) -> None:
    """CaptureError where a tensor that the forward keeps for the next one, in an attribute that is no buffer, depends on the
    batch (a cache of positions does not); a warning where it is one of a list or dictionary, which the next forward may empty
    first. They are the last results of `program`, by (path, name), with the line and whether such an object holds them."""
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = {nodes[name] for name in program.graph_signature.user_inputs if isinstance(name, str) and name in nodes}
    results = list(next(iter(reversed(program.graph.nodes))).args[0])
    results = results[-sum(len(tensors) for tensors, *_ in states.values()) :]
    for (path, name), (tensors, line, inside) in states.items():
        own, results = results[: len(tensors)], results[len(tensors) :]
        place = f"{path}.{name}".lstrip(".")
        if not any(_reads_values(result, inputs) for result in own):
            continue
        if not inside:
            raise CaptureError(
                f"{line}: the forward keeps {place} for the next one, which a program does not: make it a buffer of this shape "
                "(register_buffer), or pass it in with the batch and return it"
            )
        warnings.warn(
            f"{line}: the forward leaves tensors in {place}, which a program does not: return them, and register a buffer "
            "for what the next forward reads",
            stacklevel=2,
        )


def _reads_values(result: Any, inputs: Collection[Node]) -> bool:
    """Return whether the values of a result depend on those of inputs, and not on their sizes alone."""
    seen, todo = set[Node](), [result]
    while todo:
        node = todo.pop()
        if node in inputs:
            return True
        _, name, *_ = *str(node.target).split("."), ""
        sized = name.startswith("new_") or name.endswith("_like")
        if node not in seen and isinstance(node.meta.get("val"), Tensor) and not sized:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _overlap(a: Tensor, b: Tensor) -> Any:
    """Return whether two tensors have bytes in common, between the first and the last of each."""
    (start, end), (other_start, other_end) = _extent(a), _extent(b)
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and start < other_end and other_start < end


def _extent(x: Tensor) -> tuple[Any, Any]:
    start = x.storage_offset() * x.itemsize
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return start, start + (reach * x.itemsize if x.numel() else 0)
