"""What DTensor's own sharding rules say of an operation: placements that it takes as they are, and what then comes out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from support.models.operation_examples import TensorSpec, single_operations

Placed = tuple[tuple[str, ...], tuple[str, ...]]
"""Operands and results of one axis, as text: S(0), R, P."""

LARGEST = 400
"""Combinations of operands that are asked for one example."""


def every_answer(size: int = 2) -> dict[str, list[list[Placed]]]:
    """By operation, per example of `cases` that DTensor has a rule for: all combinations that it takes without moving anything.
    For a process that has no group: makes a fake one."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    mesh, propagator = init_device_mesh("cpu", (size,)), DTensor._op_dispatcher.sharding_propagator
    known = {*propagator.op_strategy_funcs, *propagator.op_to_rules, *propagator.op_single_dim_strategy_funcs}
    out: dict[str, list[list[Placed]]] = {}
    for op, args, kwargs in single_operations():
        found = _overload(op)
        out.setdefault(op, []).append(list(_answers(found, args, kwargs, mesh, propagator, size)) if found in known else [])
    return out


def _overload(op: str) -> Any:
    words = op.split(".")
    packet = getattr(torch.ops.aten, words[1], None) if words[0] == "aten" else None
    return getattr(packet, words[2] if len(words) > 2 else "default", None)


def _tensors(args: Any) -> list[TensorSpec]:
    if isinstance(args, TensorSpec):
        return [args]
    return [each for arg in args for each in _tensors(arg)] if isinstance(args, (tuple, list)) else []


def _answers(overload: Any, args: Any, kwargs: dict[str, Any], mesh: Any, propagator: Any, size: int) -> Iterator[Placed]:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema

    operands = _tensors([args, list(kwargs.values())])
    choices = []
    for each in operands:
        shards = [Shard(dim) for dim, extent in enumerate(each.shape) if extent % size == 0 and extent > 1]
        choices.append([Replicate(), *shards, *([Partial()] if each.dtype == "float64" else [])])
    for number, chosen in enumerate(product(*choices)):
        if number >= LARGEST:
            return
        left = list(chosen)

        def spec(arg: Any, left: list[Any] = left) -> Any:
            if isinstance(arg, TensorSpec):
                tensor = torch.empty(arg.shape, dtype=getattr(torch, arg.dtype), device="meta")
                return DTensorSpec(mesh, (left.pop(0),), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
            return type(arg)(spec(each) for each in arg) if isinstance(arg, (tuple, list)) else arg

        try:
            schema = OpSchema(overload, tuple(spec(arg) for arg in args), {name: spec(arg) for name, arg in kwargs.items()})
            schema.schema_info = propagator.op_to_schema_info.get(overload)
            answer = propagator.propagate_op_sharding_non_cached(schema)
        except Exception:  # noqa: BLE001  DTensor refuses this combination
            continue
        if answer.output_spec is None or (answer.needs_redistribute and _moved(answer.redistribute_schema, chosen)):
            continue
        results = answer.output_spec if isinstance(answer.output_spec, (tuple, list)) else [answer.output_spec]
        yield tuple(map(_text, chosen)), tuple(_text(each.placements[0]) for each in results if each is not None)


def _moved(schema: Any, chosen: Any) -> bool:
    """Whether an operand is redistributed; arguments that are sizes become local ones by the same way."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    leaves = torch.utils._pytree.tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [each.placements[0] for each in leaves if isinstance(each, DTensorSpec)] != list(chosen)


def _text(placement: Any) -> str:
    from torch.distributed.tensor import Partial, Shard

    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    return "R" if type(placement).__name__ == "Replicate" else str(placement)
