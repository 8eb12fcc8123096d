"""Outlines equal layers: one is traced, the others become one opaque call each, which `convert` replaces by a copy of the trace.

Two layers are equal when nothing that their forward can see differs: class, mode, hooks, every attribute, the shapes of all
parameters and buffers, and the arguments of the call apart from tensor values. The one exception is a whole number that is the
layer's own index (``layer_idx``): it may differ as long as the traced layer never reads it. All other layers are traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autopar.capture.layers import CONTAINERS
from autopar.capture.tracing.fake_copy import has_no_data
from autopar.capture.tracing.layer_calls import call_words, describe

NAMESPACE = "autopar_capture"
FEWEST = 3
"""Fewer equal layers than this are all traced."""


class CannotOutline(Exception):
    """Layers that look equal are not: the whole model must be traced."""


@dataclass(slots=True)
class TracedLayer:
    """The traced one of equal layers, and its single call."""

    path: str
    arguments: Any = None
    result: Any = None
    like: tuple[int, ...] = ()
    calls: int = 0


@dataclass(slots=True)
class EqualLayers:
    """Equal layers; `index_names` are attributes that hold the layer's index."""

    paths: tuple[str, ...]
    index_names: frozenset[str]
    traced: TracedLayer = field(init=False)

    def __post_init__(self) -> None:
        self.traced = TracedLayer(self.paths[0])


@lru_cache(maxsize=1)
def outline_operators() -> tuple[Any, Any, Any]:
    """The operators ``mark(tensors, key)``, the border of a traced layer, and ``outlined(tensors, like, key)``, an opaque
    layer; and the library that keeps them alive. They are only traced; `torch.library.custom_op` takes ten times as long per
    call."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("mark(Tensor[] x, str key) -> Tensor[]")
    library.define("outlined(Tensor[] x, int[] like, str key) -> Tensor[]")
    library.impl("mark", lambda x, key: [torch.empty_like(item) for item in x], "Meta")
    library.impl("outlined", lambda x, like, key: [torch.empty_like(x[index]) for index in like], "Meta")
    for name in ("mark", "outlined"):
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    defined = getattr(torch.ops, NAMESPACE)
    return defined.mark.default, defined.outlined.default, library


@contextmanager
def as_if_first(groups: Sequence[EqualLayers]) -> Iterator[None]:
    """Let the layers be called once more, as if it was for the first time."""
    before = [copy.copy(group.traced) for group in groups]
    for group in groups:
        group.traced.calls = 0
    try:
        yield
    finally:
        for group, traced in zip(groups, before, strict=True):
            for each in fields(TracedLayer):
                setattr(group.traced, each.name, getattr(traced, each.name))


@contextmanager
def outline(model: nn.Module) -> Iterator[list[EqualLayers]]:
    """While active, equal layers of `model` (a copy: their `forward` is replaced) are opaque. Yields them."""
    groups = find_groups(model)
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for group in groups:
            first = modules[group.paths[0]]
            watched = {type(module) for module in first.modules()}
            reads: list[str] = []
            for path in group.paths:
                module = modules[path]
                module.forward = _replacement(module, path, group, reads)
                if module is not first:
                    _empty(module)
            for name in group.index_names:
                for kind in watched:
                    stack.enter_context(_watch(kind, name, reads))
        yield groups


def _empty(module: nn.Module) -> None:
    """Removes parameters and submodules of an opaque layer, which never runs, so that the export does not handle them."""
    module._parameters.clear()
    module._buffers.clear()
    module._modules.clear()


def _replacement(module: nn.Module, path: str, group: EqualLayers, reads: list[str]) -> Callable[..., Any]:
    forward, seen = module.forward, group.traced
    mark, outlined, _ = outline_operators()

    def traced(*args: Any, **kwargs: Any) -> Any:
        seen.calls += 1
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        arguments = describe(leaves, structure)
        if seen.calls > 1 or arguments is None:
            seen.arguments = None
            return forward(*args, **kwargs)
        entered = mark(tensors, f"enter {path}")
        versions, inner = [item._version for item in entered], iter(entered)
        args, kwargs = tree_unflatten([next(inner) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
        del reads[:]
        result = forward(*args, **kwargs)
        if reads:
            raise CannotOutline(f"{path} reads its index {reads[0]}")
        if [item._version for item in entered] != versions:
            raise CannotOutline(f"{path} writes to its arguments")
        leaves, structure = tree_flatten(result)
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        like = [_like(item, tensors) for item in results]
        outside = iter(mark(results, f"leave {path}"))
        shown = [next(outside) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        plain = all(isinstance(leaf, (Tensor, int, float, str, bool, type(None))) for leaf in leaves)
        if plain and all(index is not None for index in like):
            seen.arguments, seen.like = arguments, tuple(index for index in like if index is not None)
            places = [isinstance(leaf, Tensor) for leaf in leaves]
            seen.result = ([None if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure, places)
        return tree_unflatten(shown, structure)

    def opaque(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        arguments = describe(leaves, structure)
        if seen.arguments is None or arguments is None or seen.calls != 1 or call_words(arguments) != call_words(seen.arguments):
            raise CannotOutline(f"{path} is not called as {seen.path} is")
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        made = iter(outlined(tensors, list(seen.like), f"{seen.path} {path}"))
        constants, form, is_tensor = seen.result
        return tree_unflatten([next(made) if tensor else leaf for leaf, tensor in zip(constants, is_tensor, strict=True)], form)

    return traced if path == seen.path else opaque


def _like(result: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """The index of an argument with the shape and dtype of the result; the symbolic sizes of the result come from it."""
    for index, tensor in enumerate(tensors):
        if tuple(map(str, tensor.shape)) == tuple(map(str, result.shape)) and tensor.dtype == result.dtype:
            return index
    return None


@contextmanager
def _watch(kind: type, name: str, reads: list[str]) -> Iterator[None]:
    """Records every access of an instance attribute of a class in `reads`."""

    def get(self: nn.Module) -> Any:
        if name not in self.__dict__:
            raise AttributeError(name)
        reads.append(name)
        return self.__dict__[name]

    def put(self: nn.Module, value: Any) -> None:
        reads.append(name)
        self.__dict__[name] = value

    if hasattr(kind, name):  # a class attribute or property of that name: not replaced, and counted as read
        reads.append(name)
        yield
        return
    setattr(kind, name, property(get, put))
    try:
        yield
    finally:
        delattr(kind, name)


# -- which layers are equal


def find_groups(model: nn.Module) -> list[EqualLayers]:
    """Groups of at least `FEWEST` equal elements of ModuleLists and Sequentials: of the outermost ones, and of those inside of
    a layer that is traced."""
    owners: dict[int, int] = {}
    for _, module in model.named_modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    groups: list[EqualLayers] = []
    opaque: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, CONTAINERS) or any(f"{path}.".startswith(f"{item}.") for item in opaque):
            continue
        indices = _indices(module)
        pools: list[tuple[nn.Module, list[tuple[str, set[str]]]]] = []
        for name, child in module.named_children():
            own = f"{path}.{name}" if path else name
            if not any(True for _ in child.children()) or _shared(child, owners):
                continue
            for first, members in pools:
                differing = _difference(first, child, indices)
                if differing is not None:
                    members.append((own, differing))
                    break
            else:
                pools.append((child, [(own, set())]))
        for _, members in pools:
            if len(members) >= FEWEST:
                groups.append(
                    EqualLayers(tuple(each for each, _ in members), frozenset().union(*(names for _, names in members)))
                )
                opaque += [each for each, _ in members[1:]]
    return groups


def of_equal_code(one: nn.Module, two: nn.Module) -> bool:
    """Return whether two modules without data compute the same of equal tensors."""
    state = [[name for name, _ in (*each.named_parameters(), *each.named_buffers())] for each in (one, two)]
    return state[0] == state[1] and type(one) is type(two) and _difference(one, two, set()) is not None


def _indices(layers: nn.Module) -> set[tuple[str, str]]:
    """(submodule of an element, attribute): whole numbers that are the index of the element in all of them that have it."""
    found: dict[tuple[str, str], bool] = {}
    for index, child in enumerate(layers.children()):
        for path, module in child.named_modules():
            for name, value in module.__dict__.items():
                if type(value) is int:
                    found[path, name] = found.get((path, name), True) and value == index
    return {key for key, same in found.items() if same}


def _shared(module: nn.Module, owners: dict[int, int]) -> bool:
    tensors = [tensor for each in module.modules() for tensor in (*each._parameters.values(), *each._buffers.values())]
    return any(tensor is not None and owners[id(tensor)] > 1 for tensor in tensors)


def _difference(one: nn.Module, two: nn.Module, indices: set[tuple[str, str]]) -> set[str] | None:
    """Names of attributes that are the layers' own indices and differ, or None where anything else does."""
    left, right = list(one.named_modules()), list(two.named_modules())
    if [name for name, _ in left] != [name for name, _ in right]:
        return None
    places = {id(b): id(a) for (_, a), (_, b) in zip(left, right, strict=True)}
    names: set[str] = set()
    for (path, a), (_, b) in zip(left, right, strict=True):
        if type(a) is not type(b) or a.__dict__.keys() != b.__dict__.keys():
            return None
        for name, value in a.__dict__.items():
            other = b.__dict__[name]
            if name == "_modules":
                continue
            if (path, name) in indices and value != other:
                names.add(name)
            elif not _equal(value, other, places):
                return None
    return names


def _equal(one: Any, two: Any, places: dict[int, int]) -> bool:
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        alike = (one.shape, one.dtype, one.requires_grad) == (two.shape, two.dtype, two.requires_grad)
        return alike and has_no_data(one) and has_no_data(two)  # with values they may be more than state: a constant
    if isinstance(one, dict):
        return list(one) == list(two) and all(_equal(value, two[key], places) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(_equal(a, b, places) for a, b in zip(one, two, strict=True))
    if isinstance(one, nn.Module):
        return places.get(id(two)) == id(one)
    if isinstance(one, (bool, int, float, str, set, frozenset, torch.dtype, torch.device)):
        return bool(one == two)
    return _plain(one) and _equal(one.__dict__, two.__dict__, places)


def _plain(one: Any) -> bool:
    """Return whether all that an object holds is in its attributes, as for instances of classes that are written in Python."""
    kind = type(one)
    if any("__reduce_ex__" in each.__dict__ or "__reduce__" in each.__dict__ for each in kind.__mro__[:-1]):
        return False
    try:
        state = one.__reduce_ex__(2)[2]
    except TypeError:
        return False
    return hasattr(one, "__dict__") and (state is None or (isinstance(state, dict) and state.keys() == one.__dict__.keys()))
