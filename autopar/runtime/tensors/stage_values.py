"""Values computed of the parameters and gradients of a stage of a pipeline, which has only its own. Of one of them each is right;
a sum over all of them is that of all stages once it is read, a norm or extreme at once, and all else of several together is
refused.

What each DTensor was computed of is noted operation by operation. The program's own calls take shards, and do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from math import isinf
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..compat.autograd import in_backward
from ..compat.compile import is_traced
from ..compat.dtensor import local_of, operations_of_shards, replicated, usual_operation, whole
from ..compat.hooks import replaced, shard_operations
from ..compat.torch_operations import all_operations
from ..state.gradient import flat
from ..state.stage_gradients import (
    Origins,
    StageGradients,
    combined,
    is_of_several,
    note_origins,
    origins_in_sum,
    origins_of,
    place_of,
)

_JOINS = frozenset(("cat", "stack"))
_NORMS = frozenset(("linalg_vector_norm", "norm"))
_LARGEST = frozenset(("any", "max", "amax"))
_SMALLEST = frozenset(("all", "min", "amin"))
_MULTIPLES = frozenset(("mul", "div", "neg", "clone", "to_copy"))
_ELEMENT_BY_ELEMENT = _JOINS | {"copy_", "_to_copy", "_unsafe_view", "fill_", "zero_"}
"""Operations that keep elements apart, beside those with a tag of torch that says so, views, and those without values."""
_READS = "_local_scalar_dense"
_TOTAL = "autopar_total"
_NO_LIST: Origins = frozenset(((None, ""),))
"""Is noted of what is no list of the elements of parameters, and no sum over them: a part, a product, a sum with a constant."""
_inside = ContextVar("inside", default=False)


def follow_stages() -> ExitStack:
    """Follow what is computed of a stage's parameters, until the stack is closed; after other changes of DTensor's operations,
    which this one calls."""
    table, usual = operations_of_shards(), DTensor.full_tensor

    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not (_inside.get() or self.requires_grad) and is_of_several(origins_of(self)):
            self = _of_all_stages(self)
            if is_of_several(origins := origins_of(self)) and not origins & _NO_LIST:
                raise combined("full_tensor")
        return usual(self, *args, **kwargs)

    hooks = ExitStack()
    hooks.enter_context(shard_operations({op: _followed_by(table.get(op, usual_operation)) for op in all_operations()}))
    hooks.enter_context(replaced(DTensor, "full_tensor", full_tensor))
    return hooks


def _followed_by(usual: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    def run(op: Any, args: Any, kwargs: Any) -> Any:
        if _inside.get() or in_backward() or is_traced():
            return usual(op, args, kwargs)
        token = _inside.set(True)
        try:
            if op._schema.name.startswith("aten::_foreach_"):
                return _follow_list(usual, op, args, kwargs)
            return _follow(usual, op, args, kwargs)
        finally:
            _inside.reset(token)

    return run


def _follow(usual: Callable[[Any, Any, Any], Any], op: Any, args: Any, kwargs: Any) -> Any:
    tensors = [each for each in (*flat(args), *kwargs.values()) if isinstance(each, torch.Tensor)]
    found = [origins_of(each) for each in tensors]
    origins = frozenset[Any]().union(*found)
    if not origins:
        return usual(op, args, kwargs)
    word = op._schema.name.removeprefix("aten::")
    into_plain = op._schema.is_mutable and isinstance(args[0], torch.Tensor) and not isinstance(args[0], DTensor)
    if into_plain and any(map(_is_number, tensors[1:])) and is_of_several(origins_in_sum(args[0], origins, word != "copy_")):
        raise combined("a sum that begins as an ordinary tensor (begin it with the number 0)")
    # a differentiable sum is a penalty, and goes into a backward of this stage
    penalty = word != _READS and torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    if not is_of_several(origins) or word.endswith("_like"):
        result = usual(op, args, kwargs)
        begins = not penalty and _adds_constant(word, args, result)
        return _noted(result, origins | _NO_LIST if begins else origins)
    if _is_sum(op, word.strip("_"), tensors, found, penalty):
        return _noted(usual(op, args if penalty else _counted_once(op, word, args), kwargs), origins)
    pending = any(map(_is_pending, tensors))
    if pending and not penalty:
        return _follow(usual, op, *tree_map_only(DTensor, _of_all_stages, (args, kwargs)))
    several = any(map(is_of_several, found))
    if several and not penalty and (word in _NORMS or (word in _LARGEST | _SMALLEST and op._overloadname == "default")):
        return _reduced_over_stages(usual, op, word, args, kwargs)
    if pending or (several and not _keeps_elements(op, word, args)):
        raise combined("a number" if word == _READS else word.strip("_"))
    result = usual(op, args, kwargs)
    made = [each for each in flat((result,)) if isinstance(each, DTensor)]
    if not several and word not in _JOINS and any(each.numel() == 1 for each in made):
        raise combined(word.strip("_"))
    some = len({each for each in found if each}) > 1 or any(each.numel() < tensors[0].numel() for each in made)
    some = some and word not in _JOINS
    return _noted(result, origins | _NO_LIST if some else origins)


def _noted(result: Any, origins: Origins) -> Any:
    for each in flat((result,)):
        if isinstance(each, DTensor):
            note_origins(each, origins)
    return result


def _is_number(value: torch.Tensor) -> bool:
    """Return whether a number was computed of parameters, and is none of them."""
    return value.numel() == 1 and bool(origins_of(value)) and place_of(value)[0] is None


def _is_pending(value: Any) -> bool:
    """Return whether a number is a sum over parameters of a stage, which is not that of all stages yet."""
    origins = origins_of(value)
    return is_of_several(origins) and value.numel() == 1 and not origins & _NO_LIST


def _adds_constant(word: str, args: Any, result: Any) -> bool:
    """Return whether what begins as some number, and might go on as a sum over parameters, is made: each stage would begin so."""
    if word.strip("_") not in ("add", "sub", "rsub") or not isinstance(result, torch.Tensor) or result.numel() > 1:
        return False
    return any(bool(local_of(each).any()) if isinstance(each, torch.Tensor) else each for each in args if not origins_of(each))


def _is_sum(op: Any, word: str, tensors: Sequence[torch.Tensor], found: Sequence[Origins], penalty: bool) -> bool:
    """Return whether an operation makes a sum over parameters, or a multiple of one."""
    if any(origins & _NO_LIST for origins in found) or any(_TOTAL in each.__dict__ for each in tensors):
        return False
    if word in ("sum", "dot"):
        alike = len(set(found)) == 1 and tensors[0].numel() > 1 and not _counts_twice(found[0])
        return alike and (tensors[0].dim() == 1 or op is torch.ops.aten.sum.default)
    if any(each.numel() > 1 for each in tensors):
        return False
    if word in ("add", "sub"):
        return penalty or (len(tensors) == 2 and all(found) and (found[0] == found[1] or not found[0] & found[1]))
    if not found[0] or any(found[1:]) or not (word in _MULTIPLES or op._schema._is_view_op()):
        return False
    return penalty or _stage_of_all(tensors[0]) is not None  # what is added to a multiple of a part is no sum


def _counts_twice(origins: Origins) -> bool:
    """Return whether a list has the elements of a parameter that several stages have."""
    return any(stage is not None and len(stage.holders[name]) > 1 for stage, name in origins)


def _counted_once(op: Any, word: str, args: Any) -> Any:
    """The operands of a sum, with zeros in the place of numbers of a parameter that an earlier stage has too."""
    if word in ("sum", "dot"):
        return args

    def counted(value: DTensor) -> DTensor:
        origins = origins_of(value)
        ((stage, name),) = origins if len(origins) == 1 else ((None, ""),)
        if stage is None or stage.holders[name][0] == stage.mesh.pp.coordinate:
            return value
        zeros: DTensor = value.zero_() if op._schema.is_mutable and value is args[0] else torch.zeros_like(value)  # type: ignore[assignment]
        return zeros

    if op._schema.is_mutable:
        if place_of(args[0])[0] is not None:
            raise combined(word.strip("_"))
        args[0].__dict__.pop(_TOTAL, None)
    return tree_map_only(DTensor, counted, args)


def _of_all_stages(value: DTensor) -> DTensor:
    """The sum of all stages in the place of that of this one; any other tensor itself. Asked for once: it may be read for each
    parameter, of which stages have other numbers."""
    if not _is_pending(value):
        return value
    if _TOTAL not in value.__dict__:
        number = _stage_of_all(value).over_stages(local_of(whole(value)), 1.0)
        value.__dict__[_TOTAL] = replicated(number, value.device_mesh)
    total: DTensor = value.__dict__[_TOTAL]
    return total


def _reduced_over_stages(usual: Callable[[Any, Any, Any], Any], op: Any, word: str, args: Any, kwargs: Any) -> DTensor:
    """A norm or an extreme of all parameters of all stages."""
    stage, result = _stage_of_all(args[0]), usual(op, args, kwargs)
    given = next(iter(args[1:2]), kwargs.get("ord", kwargs.get("p")))
    order = None if word not in _NORMS else 2.0 if given is None else float(given)
    # a maximum is the same where several stages have a parameter
    if result.numel() > 1 or (order is not None and not isinf(order) and _counts_twice(origins_of(args[0]))):
        raise combined(word if order is None else "a norm")
    number = local_of(whole(result) if isinstance(result, DTensor) else result).as_subclass(torch.Tensor)
    number = stage.extreme_over_stages(number, word in _LARGEST) if order is None else stage.over_stages(number, order)
    return replicated(number, args[0].device_mesh)


def _stage_of_all(value: torch.Tensor) -> StageGradients:
    """The stage that a value is computed of all parameters of, or of all gradients."""
    origins = origins_of(value)
    ((stage, _), *_) = origins
    if stage is None or {own for own, _ in origins} != {stage} or not stage.has_all({name for _, name in origins}):
        raise combined("a sum, norm or extreme of some of them")
    return stage


def _follow_list(usual: Callable[[Any, Any, Any], Any], op: Any, args: Any, kwargs: Any) -> Any:
    results = usual(op, args, kwargs)
    lists = [each for each in args if isinstance(each, (list, tuple))]
    for position, each in enumerate(results or ()):
        if isinstance(each, DTensor):
            note_origins(each, frozenset[Any]().union(*(origins_of(members[position]) for members in lists if members)))
    return results


def _keeps_elements(op: Any, word: str, args: Any) -> bool:
    """Return whether an operation makes each element of its result of elements of its operands at that place, as DTensors."""
    if word == "equal" or (op._schema.is_mutable and not isinstance(args[0], DTensor)):
        return False
    tags = torch.Tag.pointwise in op.tags or torch.Tag.nondeterministic_seeded in op.tags
    return tags or op._schema._is_view_op() or word in _ELEMENT_BY_ELEMENT
