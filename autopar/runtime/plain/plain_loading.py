"""Loads of state dicts with the code of the plain model: hooks, conversions of old keys, extra state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import StateError, StateMismatch
from ..state.weight_source import named_tensors

EXTRA = "_extra_state"
"""The last part of the key under which torch saves what `get_extra_state` returns."""


def converts_states(model: nn.Module) -> bool:
    """Return whether a module does more at a load than torch's own do: by hooks, or methods of its class."""
    return any(
        module._load_state_dict_pre_hooks
        or module._load_state_dict_post_hooks
        or type(module).load_state_dict is not nn.Module.load_state_dict
        or not type(module)._load_from_state_dict.__module__.startswith("torch.")  # batch norms have one
        for module in model.modules()
    )


USUAL_STATES = "pass that of the plain model, or of parallel.full_state()"
_WRAPPERS = ("module.", "_orig_mod.")
"""What DistributedDataParallel and torch.compile put before the names of a model."""


def remedy_for(unexpected: Sequence[str]) -> str:
    """Return what to do about a state dict with these keys, which the model has not."""
    for prefix in _WRAPPERS:
        if unexpected and all(key.startswith(prefix) for key in unexpected):
            call = f'torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "{prefix}")'
            return f"{call} takes the prefix of a wrapped model away"
    return USUAL_STATES


def load_into_part(
    model: nn.Module, path: str, state: Mapping[str, Any], strict: bool, values: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Load a state dict into the part at `path` of a model without data that is given these `values` for it, by first names.
    Return the result of torch, and the values then."""
    with fill(model, values):
        try:
            result = model.get_submodule(path).load_state_dict(state, **({} if strict else {"strict": False}))
        except RuntimeError as error:
            words = " ".join(str(error).split()).removesuffix(".")
            raise StateMismatch(f"{words}: {USUAL_STATES}") from error
        return result, {name: each.detach() for name, each in named_tensors(model).items() if name in values}


@contextmanager
def fill(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give a model without data these tensors, by first names; afterwards it has none again."""
    before: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (own, dict(own)) for module in model.modules() for own in (module._parameters, module._buffers)
    ]
    given = {
        id(each): nn.Parameter(values[name], each.requires_grad) if isinstance(each, nn.Parameter) else values[name]
        for name, each in named_tensors(model).items()
        if name in values
    }
    try:
        for own, tensors in before:
            own.update((name, given[id(each)]) for name, each in tensors.items() if id(each) in given)
        yield
    finally:
        for own, tensors in before:
            own.clear()
            own.update(tensors)


def extra_states(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with extra state, by the keys that it has in the state dict."""
    modules = model.named_modules(remove_duplicate=False)
    return {_key(path): each for path, each in modules if type(each).get_extra_state is not nn.Module.get_extra_state}


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Set those of modules of a model without data, which has none afterwards either."""
    with fill(model, {}):
        for key, module in extra_states(model).items():
            if key in states:
                module.set_extra_state(states[key])


def extra_state(module: nn.Module) -> Any:
    """Return the extra state of a module. StateError where it is computed of tensors that have no data."""
    try:
        value = module.get_extra_state()
        if not any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_leaves(value)):
            return value
        error = None
    except RuntimeError as problem:  # of torch, where it asks a tensor without data for numbers
        error = problem
    raise StateError(
        f"{type(module).__name__}.get_extra_state reads parameters or buffers, of which a rank has its part: save "
        "parallel.full_state(), which every rank calls"
    ) from error


def _key(path: str) -> str:
    return f"{path}.{EXTRA}" if path else EXTRA
