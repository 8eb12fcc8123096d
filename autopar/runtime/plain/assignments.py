"""Assignments of a script on the tree of a parallel model.

An attribute is set on the model without data, from which programs are captured, and a program that read another value does not
run again (`frozen_reads`). Values of parameters and buffers go to where the weights are. Other tensors and modules in their
places are refused: a program has neither their shards nor their operations.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.dtensor import local_of, replace_local
from ..errors import StateError
from ..state.model_state import State
from ..state.stage_tensors import OnAnotherStage
from .plain_model import PlainModel

_BEFORE = "do it before autopar.parallelize"


class Assignments:
    """The assignments on the tree below `root`; `plain` is None for a program that was exported."""

    def __init__(self, root: nn.Module, state: State, plain: PlainModel | None) -> None:
        self.root: Any = weakref.ref(root)
        self.state, self.plain = state, plain
        self.paths = {id(node): path for path, node in root.named_modules()}
        entries = [(path, each) for path, node in root.named_modules() for each in _members(node)]
        self._entries = [each for _, each in entries]
        self._sizes = [len(each) for each in self._entries]
        self._getters = [(each.get, name) for each in self._entries for name in each]
        self._seen = [value for each in self._entries for value in each.values()]
        self._places = [_join(path, name) for path, each in entries for name in each]
        own: dict[str, Any] = {**state.every_buffer, **state.parameters, **state.unused}
        for name, each in own.items():
            if isinstance(each, DTensor) and not isinstance(each, OnAnotherStage):
                values = _Values(state, name, each)
                each.__dict__.update(autopar_values=values, autopar_aliases=weakref.WeakValueDictionary())
        for node in root.modules():
            node.__dict__["assignments"] = self

    def check_tree(self) -> None:
        """Raise a StateError where a parameter, buffer or module was replaced, added or deleted past ``setattr``."""
        now = [get(name) for get, name in self._getters]
        if all(map(is_, now, self._seen)) and list(map(len, self._entries)) == self._sizes:
            return
        odd = next((place for place, a, b in zip(self._places, now, self._seen, strict=True) if a is not b), "")
        added = (list(each)[-1] for each, size in zip(self._entries, self._sizes, strict=True) if len(each) != size)
        raise self._refused(odd or next(added))

    def assign(self, node: nn.Module, name: str, value: Any) -> None:
        """Do ``node.name = value``."""
        where = _join(self.paths.get(id(node), ""), name)
        held = next((each[name] for each in _members(node) if name in each), None)
        if held is not None and held is value:  # node.name += 1
            return
        spec = self.state.index.specs.get(self._first_name(where))
        trained = spec is not None and not spec.buffer  # also a parameter of another stage
        if trained or isinstance(held, nn.Module) or isinstance(value, (nn.Parameter, nn.Module)) or name == "forward":
            raise self._refused(where)
        if held is not None or (self.plain is not None and where in self.plain.unused):
            self._fill(where, value)
        else:
            self._set_attribute(node, where, name, value)

    def refuse(self, node: nn.Module, name: str = "") -> None:
        """Refuse methods of modules that would change their parameters, buffers and modules."""
        raise self._refused(_join(self.paths.get(id(node), ""), name).removesuffix(".") or "the model")

    def _refused(self, where: str) -> StateError:
        return StateError(
            f"{where} of the parallel model was replaced, added or deleted, which its programs do not see: {_BEFORE}, or fill "
            "the parameter that is there (parameter.data = values, load_full_state)"
        )

    def _first_name(self, where: str) -> str:
        return (self.state.tied if self.plain is None else self.plain.names).get(where, where)

    def _fill(self, where: str, value: Any) -> None:
        """Write the values of a buffer."""
        every = {**self.state.every_buffer, **(self.plain.unused if self.plain is not None else {})}
        buffer = every[where if where in every else self._first_name(where)]
        if not isinstance(value, torch.Tensor) or value.shape != buffer.shape:
            kind = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateError(f"the buffer {where} has shape {tuple(buffer.shape)}, and {kind} was assigned: {_BEFORE}")
        if value.dtype != buffer.dtype:
            raise StateError(f"the buffer {where} is {buffer.dtype}, and {value.dtype} was assigned: {_BEFORE}")
        with torch.no_grad():
            buffer.copy_(value)

    def _set_attribute(self, node: nn.Module, where: str, name: str, value: Any) -> None:
        model = node.__dict__.get("without_data")
        if model is None:
            if self.plain is None and not name.startswith("_"):
                warnings.warn(
                    f"{where} was set on an exported program, which has the attributes of the model: set it there, export again",
                    stacklevel=4,
                )
            node.__dict__[name] = value
            return
        attribute = inspect.getattr_static(type(model), name, None)
        if isinstance(attribute, property):
            if attribute.fset is None:
                raise AttributeError(f"{where} is a property without a setter")
            attribute.fset(node, value)
            return
        reads = self.plain.frozen.reads.attributes if self.plain is not None else frozenset()
        if isinstance(value, DTensor) and any(name == each for _, each in reads):
            raise StateError(f"{where} is read by the forward, and a DTensor was assigned: assign value.full_tensor()")
        model.__dict__[name] = value
        if name.startswith("_") or isinstance(value, torch.Tensor):  # which are not read from there
            node.__dict__[name] = value

    def delete(self, node: nn.Module, name: str) -> None:
        """Do ``del node.name``."""
        where = _join(self.paths.get(id(node), ""), name)
        if any(name in each for each in _members(node)):
            raise self._refused(where)
        model = node.__dict__.get("without_data")
        values = [each.__dict__.pop(name, None) for each in (node, model) if each is not None and name in each.__dict__]
        if not values:
            raise AttributeError(f"there is no {where}")


class _Values:
    """The target of ``parameter.data = values``, of a parameter or buffer: the values go into this rank's shard. What was
    ``parameter.data`` until then (the backup of averaged weights) keeps its values, in memory of its own."""

    def __init__(self, state: State, name: str, target: DTensor) -> None:
        self.state, self.name, self.target = weakref.ref(state), name, weakref.ref(target)

    def __deepcopy__(self, _: Any) -> None:
        """Return None: a copy of a parameter is no part of the model."""

    def fill(self, value: Any) -> None:
        state, target = self.state(), self.target()
        assert state is not None and target is not None, "it has the parameter"
        if tuple(value.shape) != tuple(target.shape) or value.dtype != target.dtype:
            raise StateError(
                f"{self.name} is {target.dtype} {tuple(target.shape)}, and its .data was set to {value.dtype} "
                f"{tuple(value.shape)}: choose shapes and dtypes before autopar.parallelize"
            )
        with torch.no_grad():
            local = local_of(target)
            alike = isinstance(value, DTensor) and value.placements == target.placements
            if alike and value.device_mesh == target.device_mesh:
                own = local_of(value)
            else:
                full = value.full_tensor() if isinstance(value, DTensor) else value
                own = state.local_part(self.name, full) if self.name in state.parameters else full
            if own.is_set_to(local):  # parameter.data *= 2
                return
            for alias in list(target.autopar_aliases.values()):  # type: ignore[attr-defined]
                if local_of(alias).untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
                    replace_local(alias, local_of(alias).clone())
            local.copy_(own)


def _members(node: nn.Module) -> tuple[dict[str, Any], ...]:
    return node._parameters, node._buffers, node._modules


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
