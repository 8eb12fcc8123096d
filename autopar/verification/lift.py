"""Lifts casts to float32 inside a model to float64, in the model itself and in a captured graph alike: in float64 both sides then
compute in float64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from autopar.ir.graph import Arg, DType, Graph, Value, map_graph


class LiftCasts(TorchDispatchMode):
    """While active, whatever an operation would make in float32 it makes in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lifted = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        operands = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if not func._schema.is_mutable:  # constants of ``torch.FloatTensor``, which no dtype made
            operands = tree_map(_lifted, operands)
        return func(*operands, **lifted)


def _lifted(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf


@contextmanager
def lifting() -> Iterator[None]:
    """Run a model with its casts lifted; new tensors are float64 where it does not say a dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with LiftCasts():  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.set_default_dtype(before)


def has_casts(graph: Graph) -> bool:
    """Return whether something of the graph is float32."""
    return any(value.dtype == "float32" for block in graph.blocks for value in block.values().values())


def lift_casts(graph: Graph) -> Graph:
    """The same graph with every float32 a float64."""
    return map_graph(graph, _value, _argument)


def _value(value: Value) -> Value:
    return replace(value, dtype="float64") if value.dtype == "float32" else value


def _argument(arg: Arg) -> Arg:
    return DType("float64") if isinstance(arg, DType) and arg.name == "float32" else arg
