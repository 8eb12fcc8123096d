"""Buffers that a forward writes: those that it assigns to, and those that share memory with others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.export import ExportedProgram

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
    return value.detach().clone()


def refuse_shared_buffers(model: nn.Module, program: ExportedProgram) -> None:
    """CaptureError where the forward writes a buffer whose memory another buffer or a parameter has too."""
    tensors = dict([*model.named_buffers(), *model.named_parameters()])
    storages = {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}
    for name in _written(program):
        other = next((each for each, storage in storages.items() if each != name and storage == storages.get(name)), None)
        if other is not None:
            raise CaptureError(
                f"the forward writes to the buffer {name}, whose memory {other} shares, and would not see it: register the whole "
                "tensor, and slice it in the forward"
            )


def _written(program: ExportedProgram) -> Iterable[str]:
    return (name.removeprefix("module.") for name in program.graph_signature.buffers_to_mutate.values())
