"""The user's class of results: rebuilt around the loss and the outputs of the program, with what the program leaves out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from ..errors import RuntimeProblem
from ..key_value_cache import CACHE, INSTEAD_OF_CACHE
from ..module import Program
from .arguments import instance_of, object_at

Form = Any
"""The structure of the result as nested tuples, like `ir.interface.Form`."""

Missing = tuple[tuple[str, str], ...]
"""Fields that the program of a call without gradients does not return, each with the reason; the empty path is all of them."""


class Lacks(NamedTuple):
    """The fields of the model's own result that a call has not. `cache`: its key-value cache is one of them."""

    fields: Missing = ()
    cache: bool = False


_NOTHING = Lacks()

_CONTAINERS = ("tuple", "list", "dict", "class", "defaultdict")


def build_result(
    form: Form,
    loss: torch.Tensor,
    outputs: Mapping[str, Any],
    path: str = "",
    lacks: Lacks = _NOTHING,
    examples: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """The result in the given form, with a `LeftOut` for each tensor that the program does not return. A class that this process
    has not loaded becomes a plain namespace. `examples`: the size of the batch, by input."""
    if form is None:
        reasons = (reason for lacking, reason in lacks.fields if not lacking or f"{lacking}.".startswith(f"{path}."))
        return LeftOut(path, lacks=next(reasons, ""))
    kind, *rest = form
    if kind == "cache":
        return LeftOut(path, CACHE) if lacks.cache else None
    if kind == "examples":
        return examples[rest[0]] * rest[1] + rest[2]
    if kind == "loss":
        return loss.reshape([1] * rest[0]) if rest else loss
    if kind == "output":
        return outputs[rest[0]]
    if kind not in _CONTAINERS:
        return _beside_tensors(kind, rest, outputs, path, loss)
    if kind == "defaultdict":
        factory, inside = (build_result(each, loss, outputs, path, lacks, examples) for each in rest)
        return defaultdict(factory if isinstance(factory, type) else None, inside)  # a plan, which is data, names no function
    parts: Any = enumerate(rest[0]) if kind in ("tuple", "list") else rest[-1]
    fields: dict[Any, Any] = {
        key: build_result(each, loss, outputs, f"{path}.{key}" if path else str(key), lacks, examples) for key, each in parts
    }
    if kind in ("tuple", "list"):
        return tuple(fields.values()) if kind == "tuple" else list(fields.values())
    if len(rest) > (1 if kind == "dict" else 2):  # keys that are no texts
        fields = dict(zip((build_result(key, loss, outputs) for key in rest[-2]), fields.values(), strict=True))
    return fields if kind == "dict" else instance_of(object_at(rest[0]), fields)


def _beside_tensors(kind: str, rest: list[Any], outputs: Mapping[str, Any], path: str, loss: torch.Tensor) -> Any:
    """The part of a result that is no tensor, as `ir.interface.Form` writes it."""
    if kind == "constant":
        return rest[0]
    if kind == "named":
        return object_at(rest[0])
    if kind == "member":
        enumeration, value = object_at(rest[0]), build_result(rest[1], loss, outputs)
        is_enum = isinstance(enumeration, type) and issubclass(enumeration, Enum)  # nor anything else to call
        return enumeration(value) if is_enum else value
    if kind == "device":  # of the kind that this rank computes on: its own
        device = torch.device(rest[0])
        return loss.device if isinstance(loss, torch.Tensor) and loss.device.type == device.type else device
    if kind == "size":
        output = outputs[rest[0]]
        return None if output is None else output.shape[rest[1]]
    return LeftOut(path, rest[0])


def leaves_out(form: Form) -> bool:
    """Return whether a result of this form lacks tensors."""
    if form is None or not isinstance(form, tuple) or form[0] not in _CONTAINERS:
        return form is None
    if form[0] == "defaultdict":
        return leaves_out(form[-1])
    parts = form[1] if form[0] in ("tuple", "list") else [each for _, each in form[-1]]
    return any(map(leaves_out, parts))


class NotReturned(RuntimeProblem, AttributeError):
    """A field of the result is used that the program does not return. Also an AttributeError, for libraries that try fields."""


class LeftOut:
    """A field of the result that the program does not return: its first use says how to ask for it. `held`: the type of an object
    that no plan can hold; `lacks`: why a call without gradients does not return it either."""

    __hash__ = object.__hash__

    def __init__(self, path: str, held: str = "", lacks: str = "") -> None:
        self.__dict__.update(path=path, held=held, lacks=lacks)

    def __repr__(self) -> str:
        return f"<{self.__dict__['path']}: not returned>"

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        path, held, lacks = (self.__dict__[name] for name in ("path", "held", "lacks"))
        if held == CACHE:
            raise NotReturned(f"{path} of the model's result is a {held}, which no parallel model returns: {INSTEAD_OF_CACHE}")
        if held:
            raise NotReturned(
                f"{path} of the model's result is a {held}, which no plan can hold: let the model return tensors, numbers, "
                "texts, members of an enum, and objects of these"
            )
        if lacks:
            raise NotReturned(
                f'the parallel model does not return {path}, also without gradients: {lacks}; pass outputs=("{path}",) to '
                "autopar.parallelize"
            )
        raise NotReturned(
            f'the parallel model does not return {path} with gradients on, unless asked to: pass outputs=("{path}",) to '
            f'autopar.parallelize ("{path}:gradient" where the loss is made of it), or call it under torch.no_grad() or '
            f'parallel.returning("{path}")'
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and numpy try
            raise AttributeError(name)
        return self._refuse()

    __setattr__ = __getitem__ = __setitem__ = __call__ = __iter__ = __len__ = __bool__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __neg__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __array__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch that is given one."""
        return next(each for each in tree_leaves((args, kwargs)) if isinstance(each, LeftOut))._refuse()


def refuse_left_out(value: object) -> None:
    """NotReturned for a field of a result that is passed on."""
    if isinstance(value, LeftOut):
        value._refuse()


def plain_result(program: Program, loss: torch.Tensor, outputs: Mapping[str, Any]) -> Any:
    """Return the result of a program without a form: the loss, or a namespace of the loss and the outputs."""
    return SimpleNamespace(loss=loss, **outputs) if program.outputs else loss
