"""Operations on the tensors of a pipeline: each is done by the stages that hold all of its operands, and has a result without
elements on the others. Operands that no stage has together go to all stages first, as numbers do that are read; what is written
into stays where it is. So a script does the same on all ranks, as it does without a pipeline.

The program's own calls take shards, and do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, reduce
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ..compat.autograd import apply, has_data, in_backward
from ..compat.checkpoints import around_full_states, parts_of_full_states
from ..compat.compile import is_traced
from ..compat.dtensor import (
    gathered,
    local_of,
    operations_of_shards,
    reshape_in_place,
    usual_operation,
)
from ..compat.hooks import replaced, shard_operations
from ..compat.torch_operations import all_operations
from ..state.gradient import flat
from ..state.stage_tensors import Holders, OnAnotherStage, for_holders, held_by, holders_of, on_all_stages, on_another_stage
from .mixed_operations import compared_before
from .random_draws import draws_by_values
from .result_shapes import result_shapes

Operation = Callable[[Any, Any, Any], Any]
"""Runs an operation of torch with its arguments and keywords."""

_READS = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "allclose"))
"""Operations that give a script a value."""
_inside = ContextVar("inside", default=False)
_gathers = ContextVar("gathers", default=False)


def follow_stages() -> ExitStack:
    """Let DTensor do the operations of each stage there, until the stack is closed; after other changes of DTensor's operations,
    which this one calls."""
    table, full, redistributed = operations_of_shards(), DTensor.full_tensor, DTensor.redistribute
    data: Any = DTensor.data

    def full_tensor(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return full(_outside(self), *args, **kwargs)

    def redistribute(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        self = _outside(self) if _gathers.get() else self
        placed = self if isinstance(self, OnAnotherStage) else redistributed(self, *args, **kwargs)
        out: DTensor = held_by(placed, holders_of(self))
        return out

    def put(self: DTensor, value: Any) -> None:
        value = for_holders(self, value)
        if not isinstance(self, OnAnotherStage):
            with _Inside():
                data.__set__(self, value)

    hooks = ExitStack()
    hooks.enter_context(shard_operations({op: _followed_by(table.get(op, usual_operation)) for op in all_operations()}))
    hooks.enter_context(replaced(DTensor, "full_tensor", full_tensor))
    hooks.enter_context(replaced(DTensor, "redistribute", redistribute))
    hooks.enter_context(around_full_states(_gathering))
    hooks.enter_context(parts_of_full_states(lambda each: not isinstance(each, OnAnotherStage)))
    hooks.enter_context(replaced(DTensor, "data", property(data.__get__, put)))
    return hooks


@contextmanager
def _gathering() -> Iterator[None]:
    """Let torch.distributed.checkpoint gather the tensors of all stages, as `full_tensor` does, where it makes a full state."""
    token = _gathers.set(True)
    try:
        yield
    finally:
        _gathers.reset(token)


def _outside(value: DTensor) -> DTensor:
    """The tensor as all stages have it, where a script asks for it."""
    return value if _inside.get() or holders_of(value) is None else apply(_OnAllStages, value)


class _OnAllStages(torch.autograd.Function):
    """A tensor that some stages hold, on all of them; its gradient is where the tensor is."""

    @staticmethod
    def forward(ctx: Any, value: DTensor) -> DTensor:
        ctx.holders = holders_of(value)
        out: DTensor = on_all_stages([value])[0]
        return out

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:
        return grad if ctx.holders.here else on_another_stage(grad.shape, grad.dtype, ctx.holders)


class _Inside:
    """A context in which operations are those of this stage alone."""

    def __enter__(self) -> None:
        self.token = _inside.set(True)

    def __exit__(self, *_: Any) -> None:
        _inside.reset(self.token)


def _followed_by(usual: Operation) -> Operation:
    def run(op: Any, args: Any, kwargs: Any) -> Any:
        if _inside.get():
            return usual(op, args, kwargs)
        with _Inside():
            values = [each for each in (*flat(args), *flat(kwargs.values())) if isinstance(each, torch.Tensor)]
            shards = [each for each in values if isinstance(each, DTensor)]
            if is_traced() and not has_data(local_of(shards[0])):  # an optimizer makes its state while it is traced
                return usual(op, args, kwargs)
            holders = holders_of(shards[0])
            alike = all(holders_of(each) is holders for each in shards)
            if (alike and holders is None) or _asks_of_shape(op):
                return usual(op, args, kwargs)
            if alike and len(shards) == len(values) and _needs_operands_alone(op):  # most often: of an optimizer
                return _result(usual, op, args, kwargs, values, holders)
            with compared_before(op, args):
                return (_follow_lists if _of_lists(op) else _follow)(usual, op, args, kwargs, values)

    return run


def _follow(usual: Operation, op: Any, args: Any, kwargs: Any, values: Sequence[torch.Tensor]) -> Any:
    written = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written(op)]
    everywhere = _has_values(op) or draws_by_values(op)
    holders = holders_of(written[0]) if written else None if everywhere else _together(values)
    known = {id(each) for each in written}
    operands = (each for each in (*flat(args), *flat(kwargs.values())) if id(each) not in known)
    fetched = _fetched((each for each in operands if not _has(each, holders)), awaited=_has_values(op))
    if fetched:
        args, kwargs = tree_map_only(DTensor, lambda each: fetched.get(id(each), each), (args, kwargs))
    if holders is None:
        numbers = not any(each.dim() for each in values if isinstance(each, DTensor))
        if fetched and numbers and not (written or torch.is_grad_enabled() or in_backward()):
            # ordinary numbers, as those of a gradient are without a pipeline; of several models they are on several meshes
            args, kwargs = tree_map_only(DTensor, gathered, (args, kwargs))
            return op(*args, **kwargs)
        return usual(op, args, kwargs)
    return _result(usual, op, args, kwargs, values, holders)


def _result(usual: Operation, op: Any, args: Any, kwargs: Any, values: Sequence[torch.Tensor], holders: Holders | None) -> Any:
    """The result of an operation that these stages do."""
    assert holders is not None
    if holders.here or torch.Tag.nondeterministic_seeded in op.tags:  # all ranks draw the same numbers
        result = usual(op, args, kwargs)
        several = isinstance(result, (list, tuple))
        return tree_map_only(DTensor, lambda each: held_by(each, holders), result) if several else held_by(result, holders)
    for at, name in _written(op):
        written = args[at] if at < len(args) else kwargs[name]
        if torch.Tag.inplace_view in op.tags:
            reshape_in_place(written, op, args, kwargs)
        return written
    shapes = result_shapes(op, args, kwargs)
    if isinstance(shapes, torch.Tensor):
        return _as_elsewhere(shapes, holders)
    return tree_map_only(torch.Tensor, lambda each: _as_elsewhere(each, holders), shapes)


def _follow_lists(usual: Operation, op: Any, args: Any, kwargs: Any, values: Sequence[torch.Tensor]) -> Any:
    length = len(args[0])
    lists = [at for at, each in enumerate(args) if isinstance(each, (list, tuple)) and len(each) == length]
    singles = [each for at, each in enumerate(args) if at not in lists] + list(kwargs.values())
    writes = bool(_written(op))
    rows = [[args[at][position] for at in lists] for position in range(length)]
    tensors = [[each for each in row if isinstance(each, torch.Tensor)] for row in rows]
    every = [holders_of(row[0]) if writes else _together(row) for row in tensors]
    apart = (each for row, holders in zip(rows, every, strict=True) for each in row if not _has(each, holders))
    fetched = _fetched((*apart, *(each for each in singles if not all(_has(each, holders) for holders in every))))

    def value(each: Any) -> Any:
        return fetched.get(id(each), each)

    def part(positions: Sequence[int]) -> tuple[Any, ...]:
        return tuple([value(each[p]) for p in positions] if at in lists else value(each) for at, each in enumerate(args))

    here = [position for position, holders in enumerate(every) if holders is None or holders.here]
    results = dict[int, Any]()
    kwargs = {name: value(each) for name, each in kwargs.items()}
    if here:
        results.update(zip(here, usual(op, part(here), kwargs) or (), strict=False))
    if writes:
        return None
    away = [position for position in range(length) if position not in results]
    if away:
        shapes = result_shapes(op, part(away), kwargs)
        results.update((at, _as_elsewhere(shape, every[at])) for at, shape in zip(away, shapes, strict=True))  # type: ignore[arg-type]
    return [held_by(results[position], every[position]) for position in range(length)]


def _together(values: Sequence[torch.Tensor]) -> Holders | None:
    """The stages that do an operation: those that hold all of its tensors, to which its numbers go; None for all stages. A number
    that is differentiated is on one stage only where all that it is computed of is: its gradient goes back to all of that."""
    first = holders_of(values[0])
    if all(holders_of(each) is first for each in values):
        return first
    tensors = [each for each in values if each.dim()] or values
    every = [holders for holders in map(holders_of, tensors) if holders is not None]
    graph = in_backward() or (torch.is_grad_enabled() and any(each.requires_grad for each in values))
    if len({each.pipeline.mesh.whole_mesh for each in every}) > 1:  # of models with different plans
        return None
    if not every or (graph and not tensors[0].dim() and (len(every) < len(tensors) or len({each.stages for each in every}) > 1)):
        return None
    stages = reduce(frozenset.__and__, (holders.stages for holders in every))
    return Holders(every[0].pipeline, stages) if stages else None


def _fetched(values: Iterable[Any], *, awaited: bool = False) -> dict[int, Any]:
    """Tensors by their id as all stages have them."""
    wanted = {id(each): each for each in values}
    return dict(zip(wanted, on_all_stages(wanted.values(), awaited=awaited), strict=True))


def _has(value: Any, holders: Holders | None) -> bool:
    """Return whether the stages that do an operation hold an operand of it."""
    own = holders_of(value)
    if own is None or holders is None or own is holders:
        return own is holders or own is None
    return holders.stages <= own.stages and holders.pipeline.mesh.whole_mesh == own.pipeline.mesh.whole_mesh


@cache
def _written(op: Any) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that an operation writes into."""
    arguments = enumerate(op._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


@cache
def _needs_operands_alone(op: Any) -> bool:
    """Return whether the stages that hold all operands do an operation, without a word to the others."""
    return not (_has_values(op) or draws_by_values(op) or _of_lists(op))


@cache
def _of_lists(op: Any) -> bool:
    """Return whether an operation does the same for each position of its lists."""
    return op._schema.name.startswith(("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_"))  # type: ignore[no-any-return]


@cache
def _has_values(op: Any) -> bool:
    """Return whether an operation gives a script a value, or a tensor whose shape depends on values."""
    shaped = torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags
    return shaped or op._schema.name.removeprefix("aten::") in _READS


@cache
def _asks_of_shape(op: Any) -> bool:
    """Return whether an operation gives no tensor, and needs no values (`is_same_size`)."""
    return not _written(op) and not _has_values(op) and not any("Tensor" in str(each.type) for each in op._schema.returns)


def _as_elsewhere(shape: torch.Tensor, holders: Holders) -> OnAnotherStage:
    return on_another_stage(shape.shape, shape.dtype, holders, stride=shape.stride())
