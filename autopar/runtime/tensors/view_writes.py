"""Writes into parts of DTensors (`p[0] = 1`, `weight.data[padding].zero_()`, `p[rows] = x`), as those of the whole tensor.

On 2.13.0 DTensor gathers a view that crosses shards, and what is written into that copy is lost without a word; most writes by
index it refuses. Here such a view knows what it is a view of, and a write into it is made once more in its source.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.heartbeat import glancing
from ..compat.autograd import has_data, outside_of_inference
from ..compat.dtensor import gathered, local_of, operations_of_shards, or_whole, own_part, usual_operation, view_in_place
from ..compat.hooks import shard_operations
from ..compat.torch_operations import in_place_operations
from ..errors import StateError
from ..step.same_batch import checksum
from .random_draws import ranks_agree

VIEWS = (
    *("select", "slice", "view", "unsqueeze", "squeeze", "t", "transpose", "permute", "split", "split_with_sizes", "diagonal"),
    *("unfold", "expand", "alias", "detach", "_unsafe_view", "unbind"),
)
COMPOSITE_VIEWS = (
    *("adjoint", "broadcast_to", "chunk", "contiguous", "dsplit", "expand_as", "flatten", "hsplit", "linalg_diagonal", "mH"),
    *("mT", "matrix_H", "moveaxis", "movedim", "narrow", "numpy_T", "ravel", "reshape", "reshape_as", "swapaxes", "swapdims"),
    *("tensor_split", "unflatten", "view_as", "vsplit"),
)
"""Views that torch makes of others, and asks DTensor for in inference mode alone."""
_SAME = ("aten::detach", "aten::alias")
"""Of ``x.detach()`` and ``x.data``: all of the tensor, of which is known what is known of it."""
_MARKS = ("autopar_name", "autopar_order")
Operation = Callable[[Any, Any, Any], Any]


class ViewSource(NamedTuple):
    """The tensor that a view was made of, and how."""

    source: DTensor
    operation: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    position: int | None

    def view(self, source: torch.Tensor) -> torch.Tensor:
        """Return the same view of another tensor of the source's shape."""
        results = self.operation(source, *self.arguments, **self.keywords)
        view: torch.Tensor = results if self.position is None else results[self.position]
        return view


def write_through_views() -> AbstractContextManager[None]:
    """Teach DTensor to write into parts of a tensor; after other changes of its operations, which this one calls."""
    table = operations_of_shards()
    handlers: dict[Any, Operation] = {}
    make_view = partial(_make_view, WeakIdKeyDictionary())
    for names, handler in ((COMPOSITE_VIEWS, _decompose), (VIEWS, make_view)):
        for packet in (getattr(torch.ops.aten, name) for name in names):
            handlers.update((getattr(packet, overload), handler) for overload in packet.overloads() if "out" not in overload)
    for op in in_place_operations():
        handlers[op] = _writing_by(table.get(op, usual_operation))
    return shard_operations(handlers)


def _decompose(op: Any, args: Any, kwargs: Any) -> Any:
    return op.decompose(*args, **kwargs)


def _make_view(aliases_of: WeakIdKeyDictionary, op: Any, args: Any, kwargs: Any) -> Any:
    """Make a view, of the whole tensor where 2.13.0 has no rule (``p.flatten()`` of uneven shards). Note its source where a write
    into it would not reach that, and that it is one of a parameter (`aliases_of`: by view, all of that parameter)."""
    source = args[0]
    # torch counts the writes into a view as those into its source, which an inference tensor refuses
    with nullcontext() if source.is_inference() else outside_of_inference():
        results = or_whole(usual_operation, op, args, kwargs)
    if op._schema.name in _SAME and isinstance(results, DTensor):
        results.__dict__.update((name, source.__dict__[name]) for name in _MARKS if name in source.__dict__)
    aliases = source.__dict__.get("autopar_aliases", aliases_of.get(source))
    for position, view in enumerate(results) if isinstance(results, (list, tuple)) else ((None, results),):
        if isinstance(view, DTensor) and ("autopar_view" in source.__dict__ or _is_copy(view, source)):
            view.__dict__["autopar_view"] = ViewSource(source, op, args[1:], kwargs, position)
        if isinstance(view, DTensor) and aliases is not None:
            aliases_of[view], aliases[id(view)] = aliases, view
    return results


def _is_copy(view: DTensor, source: DTensor) -> bool:
    """Return whether the view was gathered. Mostly by the placements, which all ranks know: an empty shard has no address."""
    if sum(each.is_shard() for each in view.placements) < sum(each.is_shard() for each in source.placements):
        return True
    own, other = local_of(view), local_of(source)
    return bool(own.numel()) and has_data(own) and own.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def _writing_by(usual: Operation) -> Operation:
    def run(op: Any, args: Any, kwargs: Any) -> Any:
        target = args[0]
        if not isinstance(target, DTensor):
            return usual(op, args, kwargs)
        view: ViewSource | None = target.__dict__.get("autopar_view")
        try:
            (view_in_place if torch.Tag.inplace_view in op.tags else usual)(op, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:  # no rule; what is wrong with the call itself torch says below
            if isinstance(error, torch.OutOfMemoryError):  # on one rank alone, which must not wait for the others
                raise
            _write_whole(op, args, kwargs)
        if view is not None:
            with glancing("a write into a part of a sharded tensor"):
                _write_source(view, gathered(target).clone())
        return target

    return run


def _write_whole(op: Any, args: Any, kwargs: Any) -> None:
    """Run an operation in place on whole tensors, and keep this rank's part."""
    target: DTensor = args[0]
    others = [each for each in tree_flatten((args[1:], kwargs))[0] if isinstance(each, torch.Tensor)]
    plain = [each for each in others if not isinstance(each, DTensor) and each.dim()]
    doing = "a write into a sharded tensor"
    with glancing(doing):
        if not ranks_agree(hash(tuple(map(checksum, plain))) >> 9, target, doing):
            raise StateError(
                "ranks write different values into a parallel model's parameter or gradient: make the same tensor, and the same "
                "indices, on every rank"
            )
        values = gathered(target).clone()
        op(values, *tree_map_only(DTensor, gathered, args[1:]), **tree_map_only(DTensor, gathered, kwargs))
        local_of(target).copy_(own_part(target, values))


def _write_source(view: ViewSource, values: torch.Tensor) -> None:
    """Write the values of a view into what it is a view of, and so on."""
    source = gathered(view.source).clone()
    view.view(source).copy_(values)
    local_of(view.source).copy_(own_part(view.source, source))
    if (outer := view.source.__dict__.get("autopar_view")) is not None:
        _write_source(outer, source)
