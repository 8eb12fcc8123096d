"""`scan`, `map`, `cond` and `while_loop` of torch on one process, written out in Python.

Called eagerly, torch compiles them, so that the tensors that a body closes over become operands. Under a dispatch mode it does
not compile, and its autograd then sees the operands alone: what the body closes over loses its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


class WriteOutLoops(TorchFunctionMode):
    """While active, loops and branches are the operations that they consist of, each seen by autograd and by other modes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        written = _WRITTEN_OUT.get(func.name()) if isinstance(func, torch._ops.HigherOrderOperator) else None
        if written is None:
            return func(*args, **(kwargs or {}))
        with self:  # loops inside of loops
            return written(*args, **(kwargs or {}))


def _map(body: Callable[..., Any], over: Sequence[Tensor], further: Sequence[Any]) -> Any:
    made = [body(*parts, *further) for parts in zip(*over, strict=True)]
    return tree_map(lambda *each: torch.stack(each), *made)


def _scan(
    body: Callable[..., Any], carried: Sequence[Tensor], over: Sequence[Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    """What the last step carries, and what all steps give, in the form in which a step gives them."""
    now, given_out, form = list(carried), list[list[Any]](), None
    for parts in zip(*over, strict=True):
        found, form = tree_flatten(body(*now, *parts, *additional_inputs))
        now, made = found[: len(now)], found[len(now) :]
        given_out.append(made)
    assert form is not None  # torch refuses a scan of no steps
    return tree_unflatten([*now, *map(torch.stack, zip(*given_out, strict=True))], form)


def _cond(predicate: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    return true(*operands) if predicate else false(*operands)


def _while_loop(
    condition: Callable[..., Any], body: Callable[..., Any], carried: Sequence[Any], additional_inputs: Sequence[Any] = ()
) -> Any:
    found: Any = tuple(carried)
    while condition(*tree_leaves(found), *additional_inputs):
        found = body(*tree_leaves(found), *additional_inputs)
    return found


_WRITTEN_OUT: Mapping[str, Callable[..., Any]] = {"map_impl": _map, "scan": _scan, "cond": _cond, "while_loop": _while_loop}
