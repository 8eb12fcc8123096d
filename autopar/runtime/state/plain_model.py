"""What a parallel model knows of the plain one that it was made from: the names of its state, its attributes, and its parameters,
whose optimizers and later changes would train nothing.

Only weak references to its tensors are kept, so that the plain model can be freed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import AttributeProblem, RuntimeProblem, StateError
from ..frozen_reads import FrozenReads
from ..plain_changes import PlainAttributes, ValueSample
from .gradient import hooked

_LIBRARIES = ("torch", "transformers", "diffusers")


class PlainModel:
    """`frozen`: what programs read of the `skeleton`, a copy on the meta device. `updated`: buffers that the forward writes into.
    `names`: each key of its state dict with the first name of that tensor. `unused`: tensors of the state that the program does
    not read. `extra`: entries of the state dict that are no parameters or buffers.
    `right_in`: whether the program computes what the model does in training (True) or evaluation (False)."""

    def __init__(
        self, model: nn.Module, frozen: FrozenReads, right_in: Callable[[bool], bool], updated: Collection[str] = ()
    ) -> None:
        self.frozen, self.skeleton, self.right_in = frozen, frozen.model, right_in
        self.training = self.skeleton.training
        named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        first: dict[int, str] = {}
        for name, tensor in named:
            first.setdefault(id(tensor), name)
        self.names: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        for key, value in model.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor) and id(value) in first:
                self.names[key] = first[id(value)]
            else:
                self.extra[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        self.unused: dict[str, torch.Tensor] = {}
        changing = {id(each) for module in model.modules() if isinstance(module, _NormBase) for each in module.buffers(False)}
        buffers = [(name, each) for name, each in model.named_buffers() if id(each) not in changing and name not in updated]
        self._tensors = {
            name: (weakref.ref(each), each.requires_grad, _version(each)) for name, each in (*model.named_parameters(), *buffers)
        }
        self._samples = {name: ValueSample(each) for name, each in (*model.named_parameters(), *buffers)}
        self._attributes = PlainAttributes(model)
        self._kinds = {name: (each.device, each.dtype) for name, each in (*model.named_parameters(), *buffers)}
        self.parameter_names = [name for name, _ in model.named_parameters()]
        self._ids = {id(p): (name, weakref.ref(p)) for name, p in model.named_parameters()}
        self._watch_optimizers()

    def copied(self) -> PlainModel:
        """For another parallel model, whose attributes are its own."""
        out = copy.copy(self)
        out.frozen = self.frozen.copied(copy.deepcopy(self.skeleton))
        out.skeleton = out.frozen.model
        return out

    # -- optimizers

    def _watch_optimizers(self) -> None:
        """Hooks of all optimizers, removed with this object."""
        me = weakref.ref(self)
        for register, closures in ((register_optimizer_step_pre_hook, False), (register_optimizer_step_post_hook, True)):
            handle = register(partial(_look, me, closures))
            weakref.finalize(self, handle.remove)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """RuntimeProblem where the optimizer has parameters of the plain model and no gradient for any of them: a script that
        trains the plain model too has."""
        name = ""
        every: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in every:
            known, reference = self._ids.get(id(parameter), ("", None))
            if reference is None or reference() is not parameter:
                continue
            if parameter.grad is not None:
                return
            name = name or known
        if name:
            raise RuntimeProblem(
                f"this {type(optimizer).__name__} has the parameters of the plain model ({name} ...), and would train nothing: "
                "move the line that makes it below autopar.parallelize, and give it parallel.parameters()"
            )

    # -- parameters

    def after_step(self, optimizer: Optimizer) -> None:
        """Takes down that a script which trains the plain model too has changed it."""
        for group in optimizer.param_groups:
            for name in (self._ids[id(each)][0] for each in group["params"] if id(each) in self._ids and each.grad is not None):
                reference, before, _ = self._tensors[name]
                if (tensor := reference()) is not None:
                    self._tensors[name], self._samples[name] = (reference, before, _version(tensor)), ValueSample(tensor)

    def check_unchanged(self, equal: Callable[[str, torch.Tensor], bool]) -> None:
        """RuntimeProblem where `requires_grad` or the values of the plain model's tensors have changed since, unless they are
        `equal` to those of the parallel model (loaded from its full state), or attributes that programs read."""
        if place := self._attributes.changed(self.frozen):
            raise RuntimeProblem(
                f"{place} of the plain model was changed after autopar.parallelize, which the parallel model does not see: set "
                "it on the parallel model (too); for another value in the plain model take a copy (copy.deepcopy) of it"
            )
        for name, (reference, before, version) in self._tensors.items():
            now = reference()
            if now is None:
                continue
            sample = self._samples[name]
            if (new := _version(now)) != version or sample.now() != sample.taken:
                moved = self._kinds[name] != (now.device, now.dtype)
                if not moved and not equal(name, now.detach()):
                    raise RuntimeProblem(
                        f"{name} of the plain model was changed after autopar.parallelize, which the parallel model does not "
                        "see: change it before, or call parallel.load_full_state(model.state_dict()); for other values "
                        "take a copy (copy.deepcopy) of the model"
                    )
                self._tensors[name], self._kinds[name] = (reference, before, new), (now.device, now.dtype)
                self._samples[name] = ValueSample(now)
            if now.requires_grad != before:
                raise RuntimeProblem(
                    f"{name}.requires_grad of the plain model was changed after autopar.parallelize, which the parallel model "
                    "does not see: change it before, or freeze the parallel model's parameter of that name"
                )

    # -- attributes

    def attribute(self, parallel: nn.Module, name: str) -> Any:
        """An attribute of the model that is no module or tensor, or a method of its own class (see `_called`). AttributeProblem
        where there is none, or the forward has set it."""
        self.check_attribute(self.skeleton, name)
        if name.startswith("_") or not (name in self.skeleton.__dict__ or hasattr(type(self.skeleton), name)):
            remedy = ": leave it out, a parallel model is no wrapper" if name == "module" else ""  # of DistributedDataParallel
            raise AttributeProblem(
                f"neither the parallel model nor {type(self.skeleton).__name__} has an attribute {name!r}{remedy}"
            )
        if name in self.skeleton.__dict__:
            value = self.skeleton.__dict__[name]
            if not isinstance(value, torch.Tensor):
                return value
        found = inspect.getattr_static(type(self.skeleton), name, None)
        owner = next((each for each in type(self.skeleton).__mro__ if name in each.__dict__), type(None))
        if owner.__module__.split(".")[0] not in _LIBRARIES:
            if isinstance(found, FunctionType):
                return partial(_called, found, self.skeleton, parallel)
            if isinstance(found, (staticmethod, classmethod)):
                return getattr(type(self.skeleton), name)
            if isinstance(found, property) and found.fget is not None:
                return found.fget(parallel)
            if found is not None and not callable(found):
                return found
        raise AttributeProblem(
            f"{type(self.skeleton).__name__}.{name} is not there on the parallel model: load parallel.full_state() into a plain "
            "model"
        )

    def check_attribute(self, model: nn.Module, name: str) -> None:
        """AttributeProblem for an attribute that the forward sets, whose value the parallel model does not have."""
        if self.frozen.is_written(model, name):
            raise AttributeProblem(
                f"{type(model).__name__}.{name} is set by the forward, which a parallel program does not do: return it from the "
                "forward, or make it a buffer"
            )

    # -- state

    def complete(self, held: Mapping[str, object], source: Callable[[str], torch.Tensor]) -> None:
        """Fetches the tensors of the state that the program does not have (every rank calls it)."""
        wanted = [name for name in dict.fromkeys(self.names.values()) if name not in held]
        self.unused = {name: source(name).detach().clone() for name in wanted}

    def state_dict(self, held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Full tensors by name as the state dict of the plain model, which loads it strictly; tied names share one tensor."""
        every = {**self.unused, **held}
        return {key: every[name] for key, name in self.names.items()} | self.extra

    def canonical(self, state: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A state dict of the plain model by first names. Buffers that are in no state dict keep their values."""
        saved = set(self.names.values())
        out = {name: buffer for name, buffer in buffers.items() if name not in saved} | dict(state)
        for key, name in self.names.items():
            if key in state:
                out.setdefault(name, state[key])
        return out

    def load_unused(self, state: Mapping[str, Any]) -> None:
        """Takes over what the program does not have."""
        for key, name in self.names.items():
            if name in self.unused and key in state:
                self.unused[name] = state[key].detach().clone()
        self.extra |= {key: state[key] for key in self.extra if key in state}

    def unfit_keys(self, state: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Missing and unexpected keys of a state dict."""
        known = [*self.names, *self.extra]
        return [key for key in known if key not in state], [key for key in state if key not in known]


def _called(method: FunctionType, skeleton: nn.Module, parallel: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A method of the model's class. What counts (parameters, FLOPs) is asked of the model without data, which has all of the
    parameters under every plan; what does more than return numbers or text runs on the parallel model."""
    if all(_is_plain(each) for each in (*args, *kwargs.values())):
        said, found, before = io.StringIO(), None, [(module, dict(vars(module))) for module in skeleton.modules()]
        with contextlib.suppress(Exception), contextlib.redirect_stdout(said), torch.no_grad():
            found = method(skeleton, *args, **kwargs)
        if found is not None and _is_plain(found):
            print(said.getvalue(), end="")
            return found
        for module, attributes in before:  # what it has set is set once more by the parallel model
            vars(module).clear()
            vars(module).update(attributes)
    return method(parallel, *args, **kwargs)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return value is None or isinstance(value, (int, float, complex, str, torch.dtype))


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What is another number after a change of the tensor's values."""
    return 0 if tensor.is_inference() else tensor._version, 0 if tensor.is_meta else tensor.data_ptr()


def _look(plain: weakref.ref[PlainModel], closures: bool, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step, or after one whose closure has run the model."""
    found, closure = plain(), kwargs.get("closure", next(iter(args[1:]), None))
    if found is not None and (closure is not None) == closures:
        found.check_optimizer(optimizer)
    if found is not None and closures:
        found.after_step(optimizer)


# -- the sharded state dict


class ShardedStateDict(dict[str, Any]):
    """The state dict of a parallel model: DTensors, of which each rank holds its shards. Pickling it (torch.save) warns."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        import warnings

        warnings.warn(
            "parallel.state_dict() holds only this rank's shards (DTensors): save parallel.full_state(), which every rank calls, "
            "or use torch.distributed.checkpoint on all ranks",
            stacklevel=4,
        )
        return dict, (dict(self),)

    def __copy__(self) -> ShardedStateDict:
        return ShardedStateDict(self)

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        import copy

        return copy.deepcopy(dict(self), memo)


# -- modules


class TreeNode(nn.Module):
    """A module of the tree of a parallel model. Once the tree is whole, `assignments` decides on what is set in it."""

    def keeps(self, name: str) -> bool:
        """Whether an attribute is this object's own, and not the model's."""
        return name == "training"

    def __setattr__(self, name: str, value: Any) -> None:
        assignments = self.__dict__.get("assignments")
        if assignments is None or self.keeps(name):
            super().__setattr__(name, value)
        else:
            assignments.assign(self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__dict__["assignments"].delete(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._add(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        self._add(name)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._add(name)
        super().add_module(name, module)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        self.add_module(name, module)

    def _add(self, name: str) -> None:
        assignments = self.__dict__.get("assignments")
        if assignments is not None:
            assignments.refuse(self, name)


class Container(TreeNode):
    """A module of the model by its path, with its parameters and its mode. It computes nothing, so its hooks would never run; to
    ``isinstance`` it is of the class that it stands for."""

    def stands_for(self, module: nn.Module) -> None:
        """Says which module of the plain model it is; `module` is without data."""
        self.__dict__["kind"], self.__dict__["without_data"] = type(module), module

    def __getattr__(self, name: str) -> Any:
        """Also tied parameters, those of other stages of a pipeline, without values, and what the module has beside tensors and
        modules (``in_features``)."""
        further = self.__dict__.get("further_tensors", {})
        plain = getattr(self.__dict__.get("without_data"), "__dict__", {})
        if name in further:
            return further[name]
        if name in plain and not name.startswith("_") and not isinstance(plain[name], torch.Tensor):
            self.__dict__["assignments"].plain.check_attribute(self.__dict__["without_data"], name)
            return plain[name]
        return super().__getattr__(name)

    def _no_module(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["assignments"].refuse(self)

    append = extend = insert = pop = update = __setitem__ = __delitem__ = _no_module

    def __getitem__(self, key: int | str) -> nn.Module:
        """A child, as of ModuleList, Sequential and ModuleDict."""
        return list(self.children())[key] if isinstance(key, int) else self.get_submodule(key)

    def __len__(self) -> int:
        return len(self._modules)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self.children()))

    @property  # type: ignore[override, misc, unused-ignore]
    def __class__(self) -> Any:  # what isinstance asks for
        return self.__dict__.get("kind", Container)

    @__class__.setter
    def __class__(self, kind: Any) -> None:  # what torch.nn.utils.parametrize does
        self._no_module()

    def _no_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeProblem(
            "a hook of a part of the parallel model would never run: register it on the parallel model itself, or ask for the "
            'value with parallelize(..., outputs=("..."))'
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a part without tensors of its own (an activation) computes; any other part has no program."""
        module = self.__dict__.get("without_data")
        if module is not None and not any(True for _ in (*module.parameters(), *module.buffers())):
            return module.train(self.training)(*args, **kwargs)
        raise RuntimeProblem(
            f"a part of the parallel model ({type(module).__name__}) computes nothing alone: call the whole model, ask for the "
            'value with parallelize(..., outputs=("...")), or parallelize the part as a model of its own'
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeProblem("a part of the parallel model cannot be pickled: save parallel.full_state(), which every rank calls")

    register_forward_hook = register_forward_pre_hook = register_full_backward_hook = _no_hook
    register_full_backward_pre_hook = register_backward_hook = _no_hook


def hooked_modules(model: nn.Module) -> list[str]:
    """The paths of modules with a forward hook of the user."""
    return [path or type(model).__name__ for path, module in model.named_modules() if any(_own_hooks(module))]


def _own_hooks(module: nn.Module) -> Iterator[bool]:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        owner = getattr(hook, "__module__", None) or type(hook).__module__
        yield not str(owner).startswith("torch.")


def check_parameters(parameters: Mapping[str, nn.Parameter], may_train: Callable[[str], bool]) -> None:
    """Before a call: StateError where a parameter trains that may not, or one has a hook that would never run."""
    for name, parameter in parameters.items():
        if parameter.requires_grad and not may_train(name):
            raise StateError(
                f"{name} was frozen when the plan was made and requires a gradient now, which the program does not compute: call "
                "requires_grad_(True) before autopar.parallelize"
            )
        if hooked(parameter):
            raise StateError(f"{name} has a gradient hook, which would never run: change .grad after the backward instead")
