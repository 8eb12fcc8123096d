"""Buffers that a forward assigns to, those that share memory with others, and tensors that are no buffers and take gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from autopar.capture.state.python_state import PlainState
from autopar.capture.state.value_flow import address
from autopar.capture.tracing.fake_copy import has_no_data
from autopar.errors import CaptureError
from autopar.runtime.compat.autograd import storage_span


@contextmanager
def assigned_buffers(model: nn.Module) -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Let each buffer have, at the end of the forward inside, what it assigns to the buffer's name (``self.mean = 0.9 * self.mean
    + ...``). `torch.export` does so for buffers of the outermost module alone, and drops all others (seen on 2.13.0).
    Yields what refuses results that are the old tensor of such a buffer, into which the new values go."""
    before = [
        (path, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]

    def changes() -> list[tuple[str, nn.Module, str, Tensor]]:
        return [each for each in before if each[1]._buffers.get(each[2]) is not each[3]]

    def refuse_old(results: Iterable[Tensor]) -> None:
        old = {id(buffer): f"{path}.{name}".lstrip(".") for path, _, name, buffer in changes()}
        for result in results:
            if name := old.get(id(result), old.get(id(result._base))):
                raise CaptureError(
                    f"the forward returns the buffer {name} as it was before it assigned another tensor to it: return a copy "
                    f"that is made before (self.{name.rpartition('.')[2]}.clone())"
                )

    yield refuse_old
    changed = changes()
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


def merge_buffers(program: ExportedProgram, ties: Mapping[str, str]) -> None:
    """Let the program have a buffer once that modules have under several names (a norm that layers share): a write into one input
    would leave the others as they were. `ties` has the first name of each."""
    graph, signature = program.graph, program.graph_signature
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    merged: dict[str, Node] = {}
    for spec in [each for each in signature.input_specs if each.kind is InputKind.BUFFER]:
        node = inputs[spec.arg.name]
        first = merged.setdefault(ties[str(spec.target)], node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            signature.input_specs.remove(spec)


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


def refuse_gradients(program: ExportedProgram, state: PlainState) -> None:
    """CaptureError where the program reads a tensor that takes gradients and is no parameter: of an attribute, a global or a
    closure."""
    own = {
        address(tensor): leaf.place
        for leaf in state.leaves().values()
        for tensor in leaf.tensors
        if tensor.requires_grad and tensor.is_leaf and not has_no_data(tensor)
    }
    for tensor in (each for each in program.constants.values() if isinstance(each, Tensor)):
        if place := own.get(address(tensor)):
            raise CaptureError(
                f"{place} takes a gradient and is no parameter of the model, so nobody would train it: make it one "
                "(nn.Parameter, in an attribute of a module)"
            )


def _overlap(a: Tensor, b: Tensor) -> Any:
    """Return whether two tensors have bytes in common, between the first and the last of each."""
    (start, end), (other_start, other_end) = ([place * x.itemsize for place in storage_span(x)] for x in (a, b))
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata and start < other_end and other_start < end
