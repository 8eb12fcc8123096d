"""The tree of a parallel model's modules: those of the plain model by their paths, with its parameters and modes, and without its
computation.

Tied parameters stand under all of their names, as shared modules do. Those of other stages of a pipeline are there without
elements (`state.stage_tensors`), in state dicts too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import RuntimeProblem, StateError
from ..state.model_state import State
from .plain_attributes import attribute_of
from .plain_loading import extra_state
from .plain_model import PlainModel


class TreeNode(nn.Module):
    """A module of the tree of a parallel model; `without_data`: the module of the plain model that it stands for. Once the tree
    is whole, `assignments` decides on what is set in it."""

    def keeps(self, name: str) -> bool:
        """Return whether an attribute is this object's own, and not the model's."""
        return name == "training"

    def __getattr__(self, name: str) -> Any:
        """Return also plain attributes of the module (``config``, ``in_features``), and the methods of its own class
        (``set_adapter`` of peft), which run on this object."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("without_data")
            if module is None or "assignments" not in self.__dict__:
                raise
        return attribute_of(self.__dict__["assignments"].plain.frozen, module, self, name)

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its path, also one that is called like an attribute of the parallel model (``memory``)."""
        name, _, rest = target.partition(".")
        child = self._modules.get(name)
        return super().get_submodule(target) if child is None else child.get_submodule(rest)

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return a parameter by its path, as `get_submodule` does."""
        tensor = self._tensor(target)
        return tensor if isinstance(tensor, nn.Parameter) else super().get_parameter(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return a buffer by its path, as `get_submodule` does."""
        tensor = self._tensor(target)
        return super().get_buffer(target) if tensor is None or isinstance(tensor, nn.Parameter) else tensor

    def _tensor(self, name: str) -> torch.Tensor | None:
        return next((each[name] for each in (self._parameters, self._buffers) if name in each), None)

    def __setattr__(self, name: str, value: Any) -> None:
        assignments = self.__dict__.get("assignments")
        if assignments is None or self.keeps(name):
            super().__setattr__(name, value)
        else:
            assignments.assign(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["assignments"].delete(self, name)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Allow ``.to(...)``, ``.float()`` and the like where they change nothing."""
        device: torch.device = self.assignments.state.mesh.device
        every = self.__dict__.get("without_data", self)  # with what other stages and no programs have: all ranks say the same
        for dtype in {each.dtype for each in (*nn.Module.parameters(every), *nn.Module.buffers(every))}:
            probe = torch.empty(0, dtype=dtype, device=device)
            if (after := fn(probe)).dtype != dtype:
                raise StateError(
                    "a parallel model keeps its dtypes: convert the plain model before autopar.parallelize, or pass "
                    'precision="bf16" there, which computes in 16 bits over the weights'
                )
            if after.device.type != device.type:
                raise StateError("a parallel model stays on the devices of its cluster: leave .to(device), .cpu() or .cuda() out")
            if after is not probe and after.device == probe.device:
                raise StateError("_apply would make other tensors, which programs do not see: fill those there (parameter.copy_)")
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> Self:
        """Allow it on the devices of the cluster, where the tensors keep their values."""
        return self.to(device)

    def _register_load_state_dict_pre_hook(self, hook: Any, with_module: bool = False) -> Any:
        module = self.__dict__.get("without_data", super())  # of which there are copies, and its hooks have it
        return module._register_load_state_dict_pre_hook(hook, with_module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._add(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self._add(name)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._add(name)
        super().add_module(name, module)

    def _add(self, name: str) -> None:
        assignments = self.__dict__.get("assignments")
        if assignments is not None:
            assignments.refuse(self, name)


MODULE_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ItemNode(TreeNode):
    """A module of the tree whose items are asked for as those of a container of torch."""

    def _no_module(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["assignments"].refuse(self)

    append = extend = insert = pop = update = __setitem__ = __delitem__ = _no_module

    @property
    def _items(self) -> Mapping[str, Any]:
        """The modules of a ModuleList, Sequential or ModuleDict; the parameters of a ParameterList or ParameterDict."""
        module = self.__dict__.get("without_data")
        if not isinstance(module, (nn.ParameterList, nn.ParameterDict)):
            return self._modules
        return {name: getattr(self, name) for name in module._parameters}

    _keys = _items  # of a ParameterDict, whose methods read it

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, str):
            return self._items[key]
        items = list(self._items.values())
        if isinstance(key, int):
            return items[key]
        out = Container()
        part = self.__dict__["without_data"][key]
        out.stand_for(part, {})
        out.__dict__["assignments"] = self.__dict__["assignments"]
        held: Any = out._parameters if isinstance(part, nn.ParameterList) else out._modules
        held.update(zip([*part._parameters, *part._modules], items[key], strict=True))
        return out

    def __contains__(self, key: str) -> bool:
        return key in self._modules or key in self._parameters

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        items, module = self._items, self.__dict__.get("without_data")
        return iter(list(items if isinstance(module, (nn.ModuleDict, nn.ParameterDict)) else items.values()))


class _Kind(type):
    """The class of a container's class, which equals the class that the container stands for: ``type(m) == nn.Linear``,
    ``type(m) in (nn.BatchNorm1d, nn.BatchNorm2d)``. No class can be another one to ``is``."""

    kind: type | None = None

    def __eq__(cls, other: object) -> bool:
        return cls is other or (other is not None and other is cls.kind)

    def __hash__(cls) -> int:
        return hash(cls.kind) if cls.kind is not None else type.__hash__(cls)


class Container(ItemNode, metaclass=_Kind):
    """A module of the model by its path, with its parameters and its mode. It computes nothing, so its hooks would never run; to
    ``isinstance`` it is of the class that it stands for."""

    def stand_for(self, module: nn.Module, classes: dict[type, type]) -> None:
        """Be a module of the plain model. `classes`: of the containers that stand for modules of each class."""
        self.__dict__["without_data"] = module
        kind = type(module)
        if kind not in classes:
            names = {"kind": kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
            names |= {"get_extra_state": _extra_state, "set_extra_state": _set_extra_state}  # called where `kind` has them
            classes[kind] = _Kind(kind.__name__, (Container,), names)
        object.__dict__["__class__"].__set__(self, classes[kind])

    def extra_repr(self) -> str:
        """Return what a module says of itself."""
        return self.__dict__["without_data"].extra_repr() if "without_data" in self.__dict__ else ""

    @property  # type: ignore[override, misc, unused-ignore]
    def __class__(self) -> Any:  # what isinstance asks for
        return type(self.__dict__.get("without_data", self))

    @__class__.setter
    def __class__(self, kind: Any) -> None:  # what torch.nn.utils.parametrize does
        self._no_module()

    def _no_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeProblem(
            "a hook of a part of the parallel model would never run: register it on the parallel model itself, or ask for the "
            'value with parallelize(..., outputs=("..."))'
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a part without tensors of its own (an activation); any other part has no program."""
        module = self.__dict__.get("without_data")
        if module is not None and not any(True for _ in (*module.parameters(), *module.buffers())):
            return module.train(self.training)(*args, **kwargs)
        raise RuntimeProblem(
            f"a part of the parallel model ({type(module).__name__}) computes nothing alone: call the whole model, ask for the "
            'value with parallelize(..., outputs=("...")), or parallelize the part as a model of its own'
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the result of `state_dict`, or the state dict of the plain model's module (all ranks must call then)."""
        assignments: Any = self.__dict__.get("assignments")
        path = "" if assignments is None or assignments.plain is None else assignments.paths.get(id(self), "")
        if not path or assign or any(isinstance(each, DTensor) for each in state_dict.values()):
            root: Any = assignments and assignments.root()
            with root.loading("load_state_dict") if root is not None else contextlib.nullcontext():
                return super().load_state_dict(state_dict, strict, assign)
        return assignments.root().load_plain_state(state_dict, strict, f"{path}.")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeProblem("a part of the parallel model cannot be pickled: save parallel.full_state(), which every rank calls")

    register_forward_hook = register_forward_pre_hook = register_full_backward_hook = _no_hook
    register_full_backward_pre_hook = register_backward_hook = _no_hook


def _extra_state(node: nn.Module) -> Any:
    return extra_state(node.__dict__["without_data"])


def _set_extra_state(node: nn.Module, state: Any) -> None:
    node.__dict__["without_data"].set_extra_state(state)


def mirror_modules(root: nn.Module, plain: PlainModel) -> list[nn.Module]:
    """Give `root` the tree of the model's modules, each in its mode: ``parallel.encoder.eval()`` and ``isinstance`` work on them.
    Return all of them."""
    root.training = plain.training
    nodes, classes = dict[int, nn.Module](), dict[type, type]()
    for path, module in plain.skeleton.named_modules(remove_duplicate=False):
        if id(module) in nodes:  # a shared module is one
            parent, leaf = node_of(root, path)
            parent._modules[leaf] = nodes[id(module)]
            continue
        node = nodes[id(module)] = _child(root, path.split(".") if path else [])
        if isinstance(node, Container):
            node.stand_for(module, classes)
        else:
            node.__dict__["without_data"] = module
        for hooks in ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"):  # those that are registered later too
            node.__dict__[hooks] = module.__dict__[hooks]
        if path:
            node.training = module.training
    return list(nodes.values())


def register_state(root: nn.Module, state: State, plain: PlainModel | None) -> None:
    """Register parameters and buffers under their names, in the order of the plain model, those of other stages of a pipeline
    too."""
    unused = {} if plain is None else plain.unused  # buffers among them are registered too
    every: dict[str, torch.Tensor] = {**unused, **state.every_parameter, **state.every_buffer}
    named = () if plain is None else (*plain.parameters, *dict(plain.skeleton.named_buffers()), *plain.names.values())
    names = [*named, *state.index.specs]
    for name in (each for each in dict.fromkeys(names) if each in every):
        (node, leaf), tensor = node_of(root, name), every[name]
        if isinstance(tensor, nn.Parameter):
            node.register_parameter(leaf, tensor)
        else:
            saved = name in unused or state.index.specs[name].persistent and (plain is None or name in plain.names.values())
            node.register_buffer(leaf, tensor, persistent=saved)


def register_further_names(root: nn.Module, state: State, names: Mapping[str, str]) -> None:
    """Register tied parameters and buffers under their further names too. `names` has the first name of each."""
    every: dict[str, torch.Tensor] = {**state.every_parameter, **state.every_buffer}
    for key, tensor in [(key, every[name]) for key, name in names.items() if key != name and name in every]:
        node, leaf = node_of(root, key)
        own: dict[str, Any] = node._parameters if isinstance(tensor, nn.Parameter) else node._buffers
        own[leaf] = tensor
        module = node.__dict__.get("without_data")
        for each in () if module is None else [*module._parameters, *module._buffers]:
            if each in own:
                own[each] = own.pop(each)  # in the order of the plain model


def node_of(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the container of a dotted name, made where missing, and the last part."""
    *path, leaf = name.split(".")
    return _child(root, path), leaf


def _child(node: nn.Module, path: list[str]) -> nn.Module:
    for part in path:
        child = node._modules.setdefault(part, Container())  # a part may be called like an attribute of `Parallel`
        assert child is not None
        node = child
    return node
