"""The plain model that a parallel one was made from: the names of its state, its tensors and its attributes."""

from __future__ import annotations

import copy
import ctypes
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from ..compat.dtensor import with_local
from ..compat.hooks import around_optimizer_steps
from ..errors import RuntimeProblem, StateError, StateMismatch
from ..state.gradient import hooked, own
from ..state.model_state import State
from ..state.weight_source import Weight, named_tensors, whole_weight
from .frozen_reads import FrozenReads
from .plain_attributes import PlainAttributes
from .plain_loading import extra_state, extra_states, fill, set_extra_states


class PlainModel:
    """The plain model of a parallel one. `frozen`: what programs read of the `skeleton`, a copy on the meta device. `updated`:
    buffers that the forward writes into. `names`: each key of its state dict with the first name of that tensor. `unused`:
    tensors of the state that the program does not read.
    `parameters`: whether each trains, in order.
    `right_in`: whether the program computes what the model does in training (True) or evaluation (False). `slow_path`: torch may
    take its fast path through a ``TransformerEncoder`` of the model in evaluation, and the program does not."""

    def __init__(
        self,
        model: nn.Module,
        frozen: FrozenReads,
        right_in: Callable[[bool], bool],
        updated: Collection[str] = (),
        *,
        slow_path: bool = False,
    ) -> None:
        self.frozen, self.skeleton, self.right_in = frozen, frozen.model, right_in
        self.training, self.slow_path = self.skeleton.training, slow_path
        self.names, extra = first_names(model)
        self._extra = {key: each.detach().clone() if isinstance(each, torch.Tensor) else each for key, each in extra.items()}
        self.unused: dict[str, torch.Tensor] = {}
        self.parameters = {name: each.requires_grad for name, each in model.named_parameters()}
        self._tensors, self._attributes = PlainTensors(model, updated), PlainAttributes(model)

    def copied(self) -> PlainModel:
        """Return it for another parallel model, whose attributes are its own."""
        out = copy.copy(self)
        out._extra, out.unused = dict(self._extra), {}
        out.frozen = self.frozen.copied(copy.deepcopy(self.skeleton))
        out.skeleton = out.frozen.model
        return out

    def modes(self, mode: bool) -> dict[str, bool]:
        """Return the modes after a ``model.train(mode)`` that is the model's own (batch norms stay in evaluation); none where it
        is torch's. A copy is asked: what else it changes (loralib merges weights) the parallel model does not do."""
        if all(type(module).train is torch.nn.Module.train for module in self.skeleton.modules()):
            return {}
        return {path: module.training for path, module in copy.deepcopy(self.skeleton).train(mode).named_modules()}

    def check_unchanged(self, equal: Callable[[str, torch.Tensor], bool]) -> None:
        """Raise a RuntimeProblem where the plain model has changed since, which the parallel model does not see, unless its
        tensors are `equal` to those of the parallel model."""
        self._attributes.check_unchanged(self.frozen)
        self._tensors.check_unchanged(equal)

    def warn_of_slow_path(self, nodes: Iterable[nn.Module]) -> None:
        """Warn once where torch may take its fast path in the modes of these modules: its padded outputs are zeros."""
        layers = (each for each in nodes if isinstance(each, nn.TransformerEncoderLayer))
        if not self.slow_path or not torch.backends.mha.get_fastpath_enabled() or all(layer.training for layer in layers):
            return
        self.slow_path = False
        warnings.warn(
            "evaluation of an nn.TransformerEncoder with src_key_padding_mask: padded positions of its output have values here, "
            "and are 0 where one process takes torch's fast path; this program equals one process after "
            "torch.backends.mha.set_fastpath_enabled(False)",
            stacklevel=2,
        )

    def complete(self, state: State, source: Callable[[str], Weight]) -> None:
        """Fetch the tensors that the program does not have (every rank calls it), and give the `state` the parameters."""
        wanted = [name for name in dict.fromkeys((*self.names.values(), *self.parameters)) if name not in state.index.specs]
        self.unused = {name: whole_weight(source(name)).clone() for name in wanted}  # where the plain model has them
        for name in (each for each in self.parameters if each in self.unused):
            value, mesh = self.unused[name], state.mesh.state_mesh
            parameter = nn.Parameter(with_local(DTensor, value, mesh, value.shape, value.stride()), self.parameters[name])
            own(parameter, None, name)
            state.unused[name] = parameter

    @property
    def extra(self) -> dict[str, Any]:
        """The entries of the state dict that are no parameters or buffers, as they are now."""
        return self._extra | {key: extra_state(each) for key, each in extra_states(self.skeleton).items() if key in self._extra}

    def state_dict(self, held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Full tensors by name as the state dict of the plain model, which loads it strictly; tied names share one tensor."""
        every = {**{name: each.clone() for name, each in self.unused.items()}, **held}
        with fill(self.skeleton, every):
            return {key: every[name] for key, name in self.names.items()} | self.extra

    def canonical(self, state: Mapping[str, Any], buffers: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """A state dict of the plain model by first names; of tied ones the last has the values, as where torch loads it. Buffers
        that are in no state dict keep their values."""
        saved = set(self.names.values())
        out = {name: buffer for name, buffer in buffers.items() if name not in saved} | dict(state)
        for key, name in self.names.items():
            if key in state:
                out[name] = state[key]
        return out

    def load_unused(self, state: Mapping[str, Any]) -> None:
        """Take over what the program does not have, in the dtypes of the model."""
        for key, name in self.names.items():
            if (held := self.unused.get(name)) is not None and key in state:
                if state[key].shape != held.shape:
                    raise StateMismatch(f"{key} has shape {tuple(state[key].shape)} but the model's has {tuple(held.shape)}")
                held.copy_(state[key].detach())
        extra = {key: state[key] for key in self._extra if key in state}
        self._extra |= extra
        set_extra_states(self.skeleton, extra)

    def unfit_keys(self, state: Mapping[str, Any], prefix: str = "") -> tuple[list[str], list[str]]:
        """Missing and unexpected keys of a state dict of the model, or of its module whose names begin with `prefix`."""
        expected = [key for key in (*self.names, *self._extra) if key.startswith(prefix)]
        return [key for key in expected if key not in state], [key for key in state if key not in expected]


def first_names(model: nn.Module) -> tuple[dict[str, str], dict[str, Any]]:
    """Return each key of the model's state dict with the first name of that parameter or buffer, and the entries that are
    neither."""
    first: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        first.setdefault(id(tensor), name)
    saved = model.state_dict(keep_vars=True)
    names = {key: first[id(value)] for key, value in saved.items() if id(value) in first}
    return names, {key: value for key, value in saved.items() if key not in names}


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Give each module of the model its own mode again afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def hooked_modules(model: nn.Module) -> list[str]:
    """The paths of modules with a forward hook of the user."""
    return [path or type(model).__name__ for path, module in model.named_modules() if any(_own_hooks(module))]


def _own_hooks(module: nn.Module) -> Iterator[bool]:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        owner = getattr(hook, "__module__", None) or type(hook).__module__
        yield not str(owner).startswith("torch.")


def check_parameters(parameters: Mapping[str, nn.Parameter], may_train: Callable[[str], bool]) -> None:
    """Raise a StateError before a call where a parameter trains that may not, or one has a hook that would never run."""
    for name, parameter in parameters.items():
        if parameter.requires_grad and not may_train(name):
            raise StateError(
                f"{name} was frozen when the plan was made and requires a gradient now, which the program does not compute: call "
                "requires_grad_(True) before autopar.parallelize"
            )
        if hooked(parameter):
            raise StateError(
                f"{name} has a gradient hook, which would never run: after the backward, change .grad (or call optimizer.step(), "
                "where the hook does)"
            )


# -- its tensors


_WINDOW_BYTES = 256


class PlainTensors:
    """The tensors of the plain `model` as they are now: its optimizers and later changes would train nothing. Only weak
    references to them are kept, so that the plain model can be freed, and samples of their values, which edits of ``.data``
    change and no version counts. `updated`: buffers that the forward writes into, which may change."""

    def __init__(self, model: nn.Module, updated: Collection[str] = ()) -> None:
        changing = {id(each) for module in model.modules() if isinstance(module, _NormBase) for each in module.buffers(False)}
        buffers = [(name, each) for name, each in model.named_buffers() if id(each) not in changing and name not in updated]
        every = (*model.named_parameters(), *buffers)
        self._tensors = {name: (weakref.ref(each), each.requires_grad, _version(each)) for name, each in every}
        self._samples = {name: ValueSample(each) for name, each in every}
        self._kinds = {name: (each.device, each.dtype) for name, each in every}
        self._ids = {id(p): (name, weakref.ref(p)) for name, p in model.named_parameters()}
        around_optimizer_steps(self, before=PlainTensors._before_step, after=PlainTensors._after_step)
        _alive().add(self)

    def trained(self) -> set[int]:
        """The ids of the parameters that are still there and take gradients."""
        every = {key: reference() for key, (_, reference) in self._ids.items()}
        return {key for key, parameter in every.items() if parameter is not None and parameter.requires_grad}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _closure(args, kwargs) is None:
            self.check_optimizer(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _closure(args, kwargs) is not None:  # only now it has run the model
            self.check_optimizer(optimizer)
        self.after_step(optimizer)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise a RuntimeProblem where the optimizer has parameters of the plain model and no gradient for any of them: a script
        that trains the plain model too has."""
        name = ""
        every: list[torch.Tensor] = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in every:
            own, reference = self._ids.get(id(parameter), ("", None))
            if reference is None or reference() is not parameter:
                continue
            if parameter.grad is not None:
                return
            name = name or own
        if name:
            raise RuntimeProblem(
                f"this {type(optimizer).__name__} has the parameters of the plain model ({name} ...), and would train nothing: "
                "move the line that makes it below autopar.parallelize, and give it parallel.parameters()"
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that a script which trains the plain model too has changed it."""
        for group in optimizer.param_groups:
            for name in (self._ids[id(each)][0] for each in group["params"] if id(each) in self._ids and each.grad is not None):
                reference, before, _ = self._tensors[name]
                if (tensor := reference()) is not None:
                    self._tensors[name], self._samples[name] = (reference, before, _version(tensor)), ValueSample(tensor)

    def check_unchanged(self, equal: Callable[[str, torch.Tensor], bool]) -> None:
        """Raise a RuntimeProblem where `requires_grad` or the values of the plain model's tensors have changed since, unless they
        are `equal` to those of the parallel model (loaded from its full state)."""
        for name, (reference, before, version) in self._tensors.items():
            now = reference()
            if now is None:
                continue
            sample = self._samples[name]
            if (new := _version(now)) != version or sample.now() != sample.first:
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


@cache
def _alive() -> weakref.WeakSet[PlainTensors]:
    """The plain tensors of every parallel model of this process that is still there."""
    return weakref.WeakSet()


def shared_parameter(model: nn.Module) -> str:
    """Return the name of a parameter that another parallel model trains a copy of, "" where there is none. One that was made of
    the very same parameters is another plan of this model."""
    own = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for other in map(PlainTensors.trained, _alive()):
        if other != own.keys() and (both := sorted(own[key] for key in own.keys() & other)):
            return both[0]
    return ""


class ValueSample:
    """A few hundred bytes of a tensor in host memory, from begin, middle and end. `first`: the bytes when it was made; empty for
    other tensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        count = tensor.numel() * tensor.element_size()
        readable = type(tensor.data) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous() and count
        size = min(count, _WINDOW_BYTES)
        offsets = sorted({0, (count - size) // 2, count - size}) if readable else ()
        window: Any = ctypes.c_char * size
        self._windows = [window.from_address(tensor.data_ptr() + offset) for offset in offsets]
        self.first = self.now()

    def now(self) -> list[bytes]:
        """The bytes as they are. Only while the tensor is there, at the same address."""
        return [each.raw for each in self._windows]


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """Return numbers of which one is another after a change of the tensor's values."""
    return 0 if tensor.is_inference() else tensor._version, 0 if tensor.is_meta else tensor.data_ptr()


def _closure(args: Any, kwargs: Any) -> Any:
    """Return the closure of an optimizer's step."""
    return kwargs.get("closure", next(iter(args[1:]), None))
