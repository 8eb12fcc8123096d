"""The table of operations: `operation` finds the record of a node's. Every other room asks here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache
from types import MappingProxyType

from autopar.operations import (
    attention,
    communication,
    control_flow,
    experts,
    factories,
    indexing,
    losses,
    norms,
    pointwise,
    products,
    reductions_and_scans,
    views,
)
from autopar.operations.images import convolutions, pooling
from autopar.operations.notation.spelling import function
from autopar.operations.operation import Operation, packet


@cache
def operations() -> Mapping[str, Operation]:
    """All records, by name. A named function that has none is the function of that name in the runtime."""
    families = (
        *(products, attention, norms, pointwise, reductions_and_scans, views, convolutions, pooling, indexing, losses, experts),
        *(factories, communication),
    )
    listed = [
        *(each for family in families for each in family.OPERATIONS),
        *control_flow.control_flow(lambda op: operation(op).rule),
    ]
    functions = [Operation(each.name, spelling=function("C")) for record in listed for each in record.functions]
    return MappingProxyType({each.name: each for each in (*functions, *listed)})


@lru_cache(maxsize=4096)
def operation(op: str) -> Operation:
    """The record of ``aten.add.Tensor``: its own, or that of ``aten.add``, or an empty one."""
    return operations().get(op) or operations().get(packet(op)) or Operation(op)
