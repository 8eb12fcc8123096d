"""Binds the example inputs to the arguments of the model's forward, and flattens them to leaves: named tensors and constants."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from autopar.errors import CaptureError
from autopar.ir.interface import Argument, Interface
from autopar.runtime.call_keys import batch_votes
from autopar.runtime.compat.modules import forward_of
from autopar.runtime.key_value_cache import INSTEAD_OF_CACHE, USE_CACHE, is_library_cache
from autopar.runtime.plain.code_reads import code_of
from autopar.runtime.plain.questions import IDENTITY, LAYOUT
from autopar.runtime.step.arguments import flatten_arguments
from autopar.runtime.step.inputs import constant_text, path_word, same_text
from autopar.runtime.step.layouts import layout_of

TARGET = "target"
"""The argument that goes to the loss function, beside the model's result."""

_CACHE = "past_key_values"

BatchDim = int | tuple[tuple[str, int], ...] | None
"""The dimension of the inputs that is the batch: all of them, or (argument, dimension); None: as their sizes say."""


class NoCache(int):
    """The False that models of transformers get for `use_cache`: they make a cache for generation unless told otherwise, which
    training never reads. It knows whether the model asked, which then makes one for True; `is_refusal`: the call said False."""

    is_asked = is_refusal = False

    def __bool__(self) -> bool:
        self.is_asked = True
        return False


@dataclass(frozen=True, slots=True)
class BoundInputs:
    """The flattened arguments. `tensors` are the graph's inputs by name, with the batch at dimension 0, `leaves` all leaves in
    order (a tensor as its name), `spec` their structure. `keeps_layout`: the forward asks how they lie in memory."""

    tensors: Mapping[str, Tensor]
    leaves: tuple[Any, ...]
    spec: TreeSpec
    interface: Interface
    keeps_layout: bool = False

    @property
    def lacks_cache(self) -> bool:
        """Return whether the model, which ran, makes a cache where `use_cache` is True."""
        return any(isinstance(leaf, NoCache) and leaf.is_asked for leaf in self.leaves)

    @property
    def shifts_places(self) -> bool:
        """Return whether the items of a tuple that the model returns have other places than with the cache, for which the call
        asks."""
        return self.lacks_cache and not any(isinstance(leaf, NoCache) and leaf.is_refusal for leaf in self.leaves)

    @property
    def batch_dims(self) -> dict[str, int]:
        return self.interface.batch_dims

    def arguments(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The keyword arguments of a call with these tensors."""
        dims = self.batch_dims
        own = {name: tensor.movedim(0, dims[name]) if name in dims else tensor for name, tensor in tensors.items()}
        filled = [own[leaf.name] if isinstance(leaf, _Input) else leaf for leaf in self.leaves]
        found: dict[str, Any] = tree_unflatten(filled, self.spec)
        return found


@dataclass(frozen=True, slots=True)
class _Input:
    name: str


def bind_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, loss_fn: Any = None, batch_dim: BatchDim = None
) -> BoundInputs:
    """The leaves of the example inputs by path: an argument of the forward, keys of dicts, indices of tuples. CaptureError for
    arguments without a name. With a `loss_fn` the call takes a further argument `TARGET`. `batch_dim`: see `batch_dims_of`."""
    name = type(model).__name__
    signature = inspect.signature(forward_of(model))
    if loss_fn is not None:
        signature = _with_target(signature)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        given_as = f"dict({next(iter(signature.parameters), TARGET)}=..., {TARGET}=...)"
        of_loss = f"; loss_fn takes the model's result and what the batch has as {TARGET}, which may be a tuple: {given_as}"
        remedy = "" if loss_fn is None else of_loss
        raise CaptureError(f"the inputs do not fit {name}.forward{signature}: {error}{remedy}") from None
    given: dict[str, Any] = {}
    for argument, value in bound.arguments.items():
        kind = signature.parameters[argument].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given.update(value)
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise CaptureError(f"{name}.forward takes {argument} by position only; write a forward that takes it by name")
        else:
            given[argument] = value
    for argument, value in given.items():
        if is_library_cache(value):
            raise CaptureError(
                f"{argument} is a {type(value).__name__} of transformers, which no parallel model takes: {INSTEAD_OF_CACHE}"
            )
    forced = {}
    if USE_CACHE in signature.parameters and given.get(_CACHE) is None and _is_pretrained(model):
        forced = {USE_CACHE: NoCache()}
        forced[USE_CACHE].is_refusal = given.get(USE_CACHE) is False
    given |= forced
    flat, spec = flatten_arguments(given)
    asked = _questions(model, loss_fn, [leaf for _, leaf in flat if isinstance(leaf, Tensor)])
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    leaves: list[Any] = []
    arguments: list[Argument] = []
    for keys, leaf in flat:
        path = ".".join(map(path_word, keys))
        if isinstance(leaf, Tensor):
            if IDENTITY in asked and id(leaf) in first:
                leaves.append(_Input(_name_of(arguments, first[id(leaf)])))
                arguments.append(Argument(path, constant=same_text(first[id(leaf)])))
                continue
            first[id(leaf)] = path
            if leaf.is_complex():
                raise CaptureError(f"input {path} is {leaf.dtype}: complex numbers are not supported; pass two real tensors")
            own = _identifier(path, tensors)
            tensors[own] = leaf
            leaves.append(_Input(own))
            arguments.append(Argument(path, own))
        else:
            leaves.append(leaf)
            text = "" if path in forced else constant_text(leaf)
            default = signature.parameters.get(path)
            optional = path in forced or (default is not None and _same(default.default, leaf))
            arguments.append(Argument(path, constant=text, optional=optional))
    if not tensors:
        raise CaptureError(f"the example inputs hold no tensor; {_remedy(flat)}")
    dims = batch_dims_of(tensors, {argument.path: argument.input for argument in arguments if argument.input}, batch_dim)
    tensors = {own: tensor.movedim(dims[own], 0) if own in dims else tensor for own, tensor in tensors.items()}
    arguments = [replace(argument, batch_dim=dims.get(argument.input, 0)) for argument in arguments]
    named = {argument.path for argument in arguments}
    arguments += [
        Argument(key, constant=constant_text(each.default), optional=True)
        for key, each in signature.parameters.items()
        if each.default is not inspect.Parameter.empty and not any(p == key or p.startswith(f"{key}.") for p in named)
    ]
    positional = tuple(key for key, each in signature.parameters.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return BoundInputs(tensors, tuple(leaves), spec, Interface(positional, tuple(arguments)), LAYOUT in asked)


def _name_of(arguments: Iterable[Argument], path: str) -> str:
    return next(each.input for each in arguments if each.path == path)


def _questions(model: nn.Module, loss_fn: Any, tensors: list[Tensor]) -> frozenset[str]:
    """The questions of the forward about these tensors whose answers are not the usual ones."""
    twice = len({id(each) for each in tensors}) < len(tensors)
    return code_of(model, loss_fn).questions if twice or any(map(layout_of, tensors)) else frozenset()


def _is_pretrained(model: nn.Module) -> bool:
    """Return whether a model is one of transformers."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


def _remedy(flat: Iterable[tuple[Any, Any]]) -> str:
    """Return the words for what to pass instead of these leaves, none of which is a tensor."""
    for keys, leaf in flat:
        path, kind = ".".join(map(path_word, keys)), type(leaf).__name__
        if hasattr(leaf, "shape"):
            return f"{path} is a {kind}: pass torch.as_tensor of it, to the plain model too"
        if not isinstance(leaf, (bool, int, float, str, type(None))):
            return f"{path} is a {kind}, which is not taken apart: pass a dataclass, a SimpleNamespace or a dict of its tensors"
    return "pass a dict of keyword arguments or a tuple"


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    """The signature with `TARGET` after what may be passed by position. The arguments before it need no default then."""
    given = list(signature.parameters.values())
    at = next(
        (i for i, each in enumerate(given) if each.kind in (each.VAR_POSITIONAL, each.KEYWORD_ONLY, each.VAR_KEYWORD)), len(given)
    )
    by_name = any(each.default is not each.empty for each in given[:at])
    kind = inspect.Parameter.KEYWORD_ONLY if by_name else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return signature.replace(parameters=[*given[:at], inspect.Parameter(TARGET, kind), *given[at:]])


def batch_of(tensors: Mapping[str, Tensor]) -> int:
    """The batch size: that of dimension 0 of most inputs; of as many, of floating-point ones (flat lists of ids are longer).
    Lists of integers beside integers ``[B, S]`` do not count (`batch_votes`)."""
    leading = Counter(tensor.shape[0] for tensor in batch_votes(tensors.values()))
    floating = {tensor.shape[0] for tensor in tensors.values() if tensor.dim() and tensor.is_floating_point()}
    return max(leading, key=lambda size: (leading[size], size in floating), default=1)


def batch_dims_of(tensors: Mapping[str, Tensor], names: Mapping[str, str], said: BatchDim) -> dict[str, int]:
    """Return the batch dimensions by input: the dimension of the batch where it is not 0. `names` are the inputs by path.
    CaptureError where `said` names none.

    Where nobody says it: dimension 1 of an input whose dimension 0 has another size than the batch of the others, if dimension 1
    has the size (sequence first), and all inputs agree then; lists of ids beside stacked offsets may have any length.
    """
    if isinstance(said, int):
        if all(tensor.dim() <= said for tensor in tensors.values()):
            inputs = ", ".join(f"{path} {tuple(tensors[name].shape)}" for path, name in names.items())
            raise CaptureError(f"batch_dim={said} is a dimension of no input: {inputs}")
        said = tuple((path, said) for path, name in names.items() if tensors[name].dim() > said)
    if said is not None:
        return _declared(tensors, names, dict(said))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor.dim()}
    leading = Counter(shape[0] for shape in shapes.values())
    most = max(leading.values(), default=0)
    candidates = [*leading.items(), *((shape[1], 0) for shape in shapes.values() if len(shape) > 2 and shape[1] not in leading)]
    for batch, count in dict(candidates).items():
        second = {name: 1 for name, shape in shapes.items() if shape[0] != batch and shape[1:2] == (batch,)}
        others = [name for name, shape in shapes.items() if shape[0] != batch and name not in second]
        tied = count == most and sum(each == most for each in leading.values()) > 1
        clear = tied or (count in (0, most) and len(leading) > 1 and all(len(shapes[name]) > 2 for name in second))
        if second and clear and not others and not _reads_both_ways(shapes, batch):
            return second
        if second and others and batch == batch_of(tensors) and _are_bags(tensors, others, second):
            return second
    return {}


def _are_bags(tensors: Mapping[str, Tensor], ids: Iterable[str], stacked: Iterable[str]) -> bool:
    """Return whether inputs are flat lists of ids, and `stacked` their offsets, one row for each embedding bag."""
    whole = all(not tensors[name].is_floating_point() for name in (*ids, *stacked))
    return whole and all(tensors[name].dim() == 1 for name in ids) and all(tensors[name].dim() == 2 for name in stacked)


def _reads_both_ways(shapes: Mapping[str, tuple[int, ...]], batch: int) -> bool:
    """Return whether another size would do as well: at dimension 0 of some inputs, and at dimension 1 of all others."""
    sizes = {shape[0] for shape in shapes.values()} - {batch}
    return any(all(size in shape[:2] for shape in shapes.values()) for size in sizes)


def _declared(tensors: Mapping[str, Tensor], names: Mapping[str, str], said: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for path, dim in said.items():
        if path not in names:
            raise CaptureError(f"batch_dim names {path}, which is no input: write one of {', '.join(names)}")
        tensor = tensors[names[path]]
        if not 0 <= dim < max(tensor.dim(), 1):
            raise CaptureError(f"batch_dim={dim} of {path}: it has shape {tuple(tensor.shape)}")
        found[names[path]] = dim
    return {name: dim for name, dim in found.items() if dim}


def _identifier(path: str, taken: Mapping[str, Tensor]) -> str:
    """A valid and unused variable name for the path."""
    name = "".join(c if c.isalnum() or c == "_" else "_" for c in path)
    name = f"x{name}" if name[:1].isdigit() else name
    while name in taken:
        name += "_"
    return name


def _same(default: Any, value: Any) -> bool:
    return default is value or (type(default) is type(value) and isinstance(value, bool | int | float | str) and default == value)
