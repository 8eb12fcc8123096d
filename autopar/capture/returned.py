"""The model's result: finds its loss and the requested outputs, and describes the form of the whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.errors import CaptureError
from autopar.ir.interface import Form


def find_loss(output: Any) -> Tensor:
    """The scalar loss: the output itself, its ``.loss``, its ``["loss"]``, or the first scalar of a tuple. CaptureError
    otherwise."""
    candidate = output
    if isinstance(output, Mapping):
        candidate = output["loss"] if "loss" in output else first_scalar(output.values())
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        candidate = output.loss
    elif isinstance(output, (tuple, list)):
        candidate = first_scalar(output)
    if not isinstance(candidate, Tensor) or not is_scalar(candidate):
        raise CaptureError(
            f"the model returns {type(output).__name__} without a scalar loss; return the loss, or an object with .loss "
            "(Hugging Face models need labels in the example inputs)"
        )
    return candidate


def is_scalar(tensor: Tensor) -> bool:
    """Whether a tensor has one element at every batch size."""
    return all(isinstance(size, int) and size == 1 for size in tensor.shape)


def first_scalar(items: Iterable[Any]) -> Tensor | None:
    """The first tensor of one element."""
    return next((item for item in items if isinstance(item, Tensor) and is_scalar(item)), None)


@dataclass(slots=True)
class Returned:
    """The parts of the model's result. `outputs` are the requested tensors, by path; `left_out` the paths of all others."""

    loss: Tensor
    outputs: dict[str, Tensor]
    form: Form
    left_out: tuple[str, ...]


def take_apart(result: Any, asked: Sequence[str]) -> Returned:
    """The parts of a result; `asked` are the requested paths. CaptureError where the result lacks one."""
    loss = find_loss(result)
    taking = _Taking(loss, tuple(asked))
    form = taking.form(result, "")
    missing = [path for path in asked if path not in taking.seen]
    if missing:
        there = ", ".join(dict.fromkeys((*taking.outputs, *taking.left_out))) or "nothing beside the loss"
        raise CaptureError(f"outputs: the model returns no tensor {missing[0]!r}; there is {there}")
    return Returned(loss.reshape(()) if loss.dim() else loss, taking.outputs, form, tuple(taking.left_out))


@dataclass(slots=True)
class _Taking:
    loss: Tensor
    asked: tuple[str, ...]
    outputs: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def form(self, item: Any, path: str) -> Form:
        """The form of an item; also fills `outputs`, `left_out` and `seen`."""
        if item is self.loss:
            self.seen |= {path} & set(self.asked)
            return ("loss",)
        if isinstance(item, Tensor):
            prefixes = {each for each in self.asked if path == each or path.startswith(f"{each}.")}
            self.seen |= prefixes
            if not prefixes:
                self.left_out.append(path)
                return None
            self.outputs[path] = item
            return ("output", path)
        if item is None or isinstance(item, (bool, int, float, str)):
            return ("constant", item)
        parts = dict(_parts(item))
        if not parts:
            self.left_out += [path] if not isinstance(item, (tuple, list, dict)) and path else []
            return (kind, ()) if (kind := _kind(item)) in ("tuple", "list", "dict") else None
        concerns = not path or any(self._concerns(path, each) for each in self.asked)
        if not concerns and not any(leaf is self.loss for leaf in _leaves(item)):
            self.left_out.append(path)
            return None
        forms = tuple((key, self.form(value, f"{path}.{key}" if path else key)) for key, value in parts.items())
        kind = _kind(item)
        if kind == "dict":
            return ("dict", forms)
        if kind in ("tuple", "list"):
            return (kind, tuple(form for _, form in forms))
        return ("class", f"{type(item).__module__}:{type(item).__qualname__}", forms)

    @staticmethod
    def _concerns(path: str, asked: str) -> bool:
        return path == asked or path.startswith(f"{asked}.") or asked.startswith(f"{path}.")


def _kind(item: Any) -> str:
    """``tuple``, ``list`` or ``dict`` for exactly these types, else ``class``."""
    return type(item).__name__ if type(item) in (tuple, list, dict) else "class"


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """The named parts of a compound item, in order."""
    if dataclasses.is_dataclass(item):
        yield from ((each.name, getattr(item, each.name, None)) for each in dataclasses.fields(item))
    elif isinstance(item, Mapping):
        yield from ((str(key), value) for key, value in item.items())
    elif isinstance(item, tuple) and hasattr(item, "_fields"):
        yield from zip(item._fields, item, strict=True)
    elif isinstance(item, (tuple, list)):
        yield from ((str(index), value) for index, value in enumerate(item))
    elif hasattr(item, "__dict__"):
        yield from ((key, value) for key, value in vars(item).items() if not key.startswith("_"))


def _leaves(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif item is not None and not isinstance(item, (bool, int, float, str)):
        for _, value in _parts(item):
            yield from _leaves(value)
