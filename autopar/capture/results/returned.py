"""The model's result: finds its loss and the requested outputs, and describes the form of the whole.

A model without a loss returns outputs that take gradients (the loss is computed outside). Its graph has a stand-in loss, the sum
of all of them (of the first one where none takes gradients), so that the planner prices their backward.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn

from autopar.capture.results.constants import constant_form, factory_form, key_forms, name_of
from autopar.capture.results.loss_name import calls_it_loss
from autopar.errors import CaptureError
from autopar.ir.graph import Graph
from autopar.ir.interface import OUTPUT_KINDS, Form, loss_path
from autopar.runtime.key_value_cache import CACHE, is_library_cache
from autopar.runtime.step.arguments import is_object, parts_of
from autopar.runtime.step.outputs import EVERYTHING

_NUMBERS = (SymInt, SymFloat, SymBool)

LOSS = "loss"
"""The kind that says which element of the result is the loss: ``outputs=("1:loss",)``."""


def find_loss(output: Any, module: nn.Module | None = None, path: str = "") -> Tensor | None:
    """The scalar loss: the only tensor of the result, its ``.loss``, ``["loss"]`` or ``["total_loss"]``, or the element of a
    tuple that `module` calls so (`loss_name`); or what lies at `path`, where somebody says it. None where there is none: a
    scalar that is called something else is an output, such as the scale of CLIP.

    Without a module it is the result of a loss function, whose only scalar is the loss.
    """
    leaves = list(leaves_of(output))
    if path:
        candidate = _at(output, path)
    elif len(leaves) == 1:
        candidate = leaves[0]
    elif isinstance(output, Mapping):
        candidate = next((output[name] for name in ("loss", "total_loss") if name in output), None)
    elif hasattr(output, "loss"):
        candidate = output.loss
    elif module is not None and isinstance(output, (tuple, list)):
        candidate = only_scalar(output)
        index = next((index for index, each in enumerate(output) if each is candidate), 0)
        candidate = candidate if candidate is not None and calls_it_loss(module, len(output), index) else None
    else:
        candidate = None
    if candidate is None and module is None and not path:
        candidate = only_scalar(output.values() if isinstance(output, Mapping) else output)
    if not any(candidate is leaf for leaf in leaves):  # a property that computes it: of the parts that come back
        return None
    return candidate if isinstance(candidate, Tensor) and is_scalar(candidate) else None


def _at(item: Any, path: str) -> Any:
    """The part of a result at a path; None where it has none."""
    for key in path.split("."):
        item = dict(parts_of(item)).get(key) if item is not None else None
    return item


def asked_loss(graph: Graph) -> tuple[str, ...]:
    """Return the words that say where the loss of a graph is in the model's result; empty where it is the result itself, or there
    is none."""
    path = loss_path(graph.interface.returns) if graph.interface is not None else ""
    return (f"{path}:{LOSS}",) if path else ()


def asked_of(graph: Graph) -> tuple[str, ...]:
    """Return the outputs to ask a capture for, so that it returns what this graph does; none where there is no loss beside."""
    return (*(output.asked for output in graph.outputs), *asked_loss(graph)) if graph.has_loss else ()


def stand_in_loss(outputs: Iterable[Tensor]) -> Tensor | None:
    """The sum of all floating-point outputs, of the others where there are none; None without any tensor."""
    every = list(outputs)
    floating = [output for output in every if output.is_floating_point()]
    total: Tensor | None = None
    for output in floating or every[:1]:
        part = output.sum() if floating else output.sum().float()
        total = part if total is None else total + part.to(total.dtype)
    return total


def parse_asked(asked: Iterable[str]) -> dict[str, str]:
    """The requested outputs (``logits``, ``logits:dtensor``) by path with their kind; it is empty where nothing is said.
    CaptureError for an unknown kind."""
    out: dict[str, str] = {}
    for text in asked:
        path, _, kind = text.partition(":")
        kinds = (*OUTPUT_KINDS, LOSS)
        if kind and kind not in kinds:
            raise CaptureError(f"outputs: {text!r} asks for {kind!r}; write {path}, or {path}:<one of {', '.join(kinds)}>")
        out[path] = kind
    return out


def is_scalar(tensor: Tensor) -> bool:
    """Return whether a tensor has one element at every batch size."""
    return all(isinstance(size, int) and size == 1 for size in tensor.shape)


def only_scalar(items: Iterable[Any]) -> Tensor | None:
    """The floating-point tensor of one element, where there is exactly one."""
    found = [item for item in items if isinstance(item, Tensor) and is_scalar(item) and item.is_floating_point()]
    return found[0] if len(found) == 1 else None


@dataclass(slots=True)
class Returned:
    """The parts of the model's result. `outputs` are the requested tensors, by path; `left_out` the paths of all others."""

    loss: Tensor
    outputs: dict[str, Tensor]
    kinds: dict[str, str]
    form: Form
    left_out: tuple[str, ...]


def take_apart(
    result: Any,
    asked: Sequence[str],
    usual_kind: str = "",
    module: nn.Module | None = None,
    *,
    where_returned: Sequence[str] = (),
    lacks_cache: bool = False,
    inputs: Mapping[str, Tensor] = MappingProxyType({}),
) -> Returned:
    """The parts of a result of `module` (None: of a loss function). `asked` are the requested outputs (`parse_asked`), and
    `where_returned` those that the result may lack; of a model without a loss all tensors of the result, where nothing is asked
    for, and so with `EVERYTHING`. `usual_kind`: how outputs come back where `asked` does not say it. `lacks_cache`: the model
    would have made a cache with `use_cache`. `inputs`: by name, those with the batch at dimension 0. CaptureError where the
    result lacks an output, or holds no tensor."""
    wanted = {path: kind for path, kind in parse_asked(where_returned).items() if any(True for _ in leaves_of(_at(result, path)))}
    wanted |= parse_asked(asked)
    said = next((path for path, kind in wanted.items() if kind == LOSS), "")
    wanted.pop(said, None)
    everything = wanted.pop(EVERYTHING, None) is not None
    loss = find_loss(result, module, said)
    usual = usual_kind or ("full" if loss is not None else "gradient")
    taking = _Taking(loss, tuple(wanted) if wanted or loss is not None else ("",), everything, lacks_cache, inputs)
    form = taking.whole_form(result)
    missing = [path for path in wanted if path not in taking.seen]
    if missing:
        there = ", ".join(dict.fromkeys((*taking.outputs, *taking.left_out))) or "nothing beside the loss"
        raise CaptureError(
            f"outputs: the model returns no tensor {missing[0]!r}; there is {there}: ask for what this call returns, or pass "
            "example inputs with which the model returns it (labels)"
        )
    kinds = {path: next((kind for each, kind in wanted.items() if kind and within(path, each)), usual) for path in taking.outputs}
    if loss is None:
        flowing = [output for path, output in taking.outputs.items() if kinds[path] == "gradient"]
        loss = stand_in_loss(flowing or list(taking.outputs.values())[:1])
    if loss is None:
        raise CaptureError(f"the model returns {type(result).__name__} without a tensor: return the loss, or what it is made of")
    return Returned(loss.reshape(()) if loss.dim() else loss, taking.outputs, kinds, form, tuple(taking.left_out))


def within(path: str, prefix: str) -> bool:
    """Return whether a path is `prefix` or a part of it; everything is within the empty one."""
    return not prefix or path == prefix or path.startswith(f"{prefix}.")


@dataclass(slots=True)
class _Taking:
    """`everything`: all tensors are asked for. `lacks_cache`: a field for a cache that is None has one with `use_cache`.
    `around`: the objects that an item is a part of; `complete`: all outputs are known, whose sizes may be numbers of the
    result."""

    loss: Tensor | None
    asked: tuple[str, ...]
    everything: bool = False
    lacks_cache: bool = False
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    around: list[int] = field(default_factory=list)
    complete: bool = False

    def whole_form(self, result: Any) -> Form:
        """The form of the whole result: of a second look, which knows all outputs."""
        self.form(result, "")
        self.left_out, self.complete = [], True
        return self.form(result, "")

    def form(self, item: Any, path: str) -> Form:
        """The form of an item; also fills `outputs`, `left_out` and `seen`."""
        if item is self.loss and item is not None:
            self.seen |= {path} & set(self.asked)
            return ("loss", item.dim()) if item.dim() else ("loss",)
        if isinstance(item, Tensor):
            prefixes = {each for each in self.asked if within(path, each)}
            self.seen |= prefixes
            if not prefixes and not self.everything:
                self.left_out.append(path)
                return None
            if self.outputs.setdefault(path, item) is not item:
                raise CaptureError(f"the model returns two tensors at {path}: give keys of dictionaries no dots")
            return ("output", path)
        if isinstance(item, _NUMBERS):
            return self._size(item, path)
        if type(item) is not tuple and (form := constant_form(item)) is not None:
            return form
        if id(item) in self.around:  # it holds itself
            return ("object", type(item).__name__)
        parts = dict(parts_of(item))
        if not parts:
            return self._without_parts(item, path)
        concerns = not path or any(self._concerns(path, each) for each in self.asked)
        if not concerns and is_library_cache(item):
            return ("object", CACHE)
        leaves = [] if concerns or self.everything else list(leaves_of(item))
        if leaves and not any(leaf is self.loss for leaf in leaves):
            self.left_out.append(path)
            return None
        self.around.append(id(item))
        forms = tuple((key, self.form(value, f"{path}.{key}" if path else key)) for key, value in parts.items())
        self.around.pop()
        if self.lacks_cache:
            lacking = [key for key in _cache_fields(item) if parts[key] is None]
            forms = tuple((key, ("cache",) if key in lacking else form) for key, form in forms)
        return _compound_form(item, forms)

    def _without_parts(self, item: Any, path: str) -> Form:
        """The form of an empty container or object; of what a plan cannot hold, such as a module, that it is this."""
        if isinstance(item, (Mapping, tuple, list)) or is_object(item):
            return _compound_form(item, ())
        return ("object", type(item).__name__) if path else None

    def _size(self, number: Any, path: str) -> Form:
        """The form of a number that the trace does not know: a size of an output, or what is computed of the batch's.
        CaptureError for another one that the user may see."""
        if number.node.expr.is_Integer:  # a question of the forward made it one, at a fixed batch
            return ("constant", int(number.node.expr))
        for name, output in self.outputs.items():
            for dim, size in enumerate(output.shape):
                if isinstance(size, SymInt) and size.node.expr == number.node.expr:
                    return ("size", name, dim)
        for name, tensor in self.inputs.items():
            if (numbers := _numbers_of(number, tensor.shape[0])) is not None:
                return ("examples", name, *numbers)
        if not self.complete or any(word.startswith("_") for word in path.split(".")):
            return ("object", "number of the batch")
        raise CaptureError(
            f"the model returns {path or 'a number'} as a number that is taken of a tensor (.item(), int()) or computed of the "
            "batch's size, which the capture does not know: return the tensor, and call .item() on what the parallel model "
            "returns (or return the size itself)"
        )

    @staticmethod
    def _concerns(path: str, asked: str) -> bool:
        return within(path, asked) or asked.startswith(f"{path}.")


def _numbers_of(number: Any, examples: Any) -> tuple[int, int] | None:
    """Return how often a number has the size of the batch in it, and what is added; None where it is made otherwise."""
    if not isinstance(number, SymInt) or not isinstance(examples, SymInt) or not examples.node.expr.is_Symbol:
        return None
    factor = number.node.expr.coeff(examples.node.expr, 1)
    more = number.node.expr - factor * examples.node.expr
    return (int(factor), int(more)) if factor.is_Integer and more.is_Integer else None


def _cache_fields(item: Any) -> list[str]:
    """The fields of a result that are caches by their annotation (``past_key_values: Cache | None``)."""
    return [each.name for each in dataclasses.fields(item) if "Cache" in str(each.type)] if dataclasses.is_dataclass(item) else []


def _compound_form(item: Any, forms: tuple[tuple[str, Form], ...]) -> Form:
    """The form of an item of the forms of its parts."""
    if type(item) in (tuple, list):
        return (type(item).__name__, tuple(form for _, form in forms))
    keys = key_forms(item) if isinstance(item, Mapping) else ()
    if type(item) is dict or (isinstance(item, Mapping) and not name_of(type(item))):
        return ("dict", *keys, forms)
    if type(item) is defaultdict:
        return ("defaultdict", factory_form(item.default_factory), ("dict", *keys, forms))
    return ("class", f"{type(item).__module__}:{type(item).__qualname__}", *keys, forms)


def leaves_of(item: Any, around: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """The tensors of a result. `around`: the objects that an item is a part of."""
    if isinstance(item, Tensor):
        yield item
    elif id(item) not in around and not isinstance(item, (enum.Enum, str, *_NUMBERS)):
        for _, value in parts_of(item):
            yield from leaves_of(value, (*around, id(item)))
