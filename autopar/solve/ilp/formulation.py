"""The variables and expressions of one ILP by name, and the model that they are columns of.

Columns, all in [0, 1] unless said otherwise:

``x[node, s]`` operation `node` of a block takes strategy s; ``w[class, p]`` a boundary class is in placement p; ``y[value, e]``
conversion e of a value is made; ``z[block, k]`` its state is sharded as in ZeRO stage k (all four one-hot or binary);
``f[consumer, e]`` the flow of one consumer; ``u[parameter, shards, k]`` the products of w and z; ``S[t]``, ``O[t]``, ``P[t, a]``
storage t is saved on the device, offloaded, or saved in parts over axis a (binary); ``A[t]`` available in the backward, ``M[t]``
recomputed for it; ``r[node, s]``, ``c[e]`` operations and conversions that are recomputed. ``h[value, p]`` are
the seconds of a backward's collective that gradients of weights hide. The rest are seconds and bytes, in the units of
`Formulation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.cost_models.events.memory_terms import STATE_FIELDS
from autopar.cost_models.step.block_memory import HeldBytes, offloaded_bytes, partitioned_bytes, recomputed_bytes
from autopar.cost_models.tensors.sizes import Aliases, PlacedValue
from autopar.solve.ilp.linear_model import LinearModel, Terms
from autopar.solve.problem.boundary import CallKind, Slot
from autopar.solve.problem.problem import Problem, StreamSeconds

Expression = dict[int, float]
"""A linear expression under construction: coefficient per column."""


_STATE_TERMS = (
    *("gather_first", "gather_backward", "reduce_last", "reduce_each", "accumulate_seconds", "optimizer_seconds"),
    *("parameters", "optimizer", *STATE_FIELDS),
)


@dataclass(slots=True)
class StateTerms:
    """Costs of one group of parameters that is gathered and reduced as one, as expressions over its w, z and u by name.

    Seconds: the fields of `StateCommunication` of the same names.
    Bytes: the fields of `StateMemory` of the same names, and buffer_bytes, the model's buffers, a constant.
    """

    expressions: dict[str, Expression] = field(default_factory=lambda: {name: {} for name in _STATE_TERMS})
    buffer_bytes: float = 0.0

    def __getitem__(self, name: str) -> Expression:
        # a later forward gathers what a backward does
        return self.expressions["gather_backward" if name == "gather_each" else name]


@dataclass(slots=True)
class StorageVariables:
    """The storages of one block that a backward may need.

    same: which placed values are one storage. sizes: in units of bytes. needs: per storage and operation, the x under which the
    operation saves it for its backward. saved: S. offloaded: O. recomputed: M, where the backward needs it and recomputes it.
    partitioned: P, by storage and mesh axis; partitioned_inputs: where the storage is an input of the block. seconds: of r, c
    and P in one call.
    """

    same: Aliases
    sizes: dict[PlacedValue, float] = field(default_factory=dict)
    needs: dict[PlacedValue, dict[str, Expression]] = field(default_factory=dict)
    saved: dict[PlacedValue, int] = field(default_factory=dict)
    offloaded: dict[PlacedValue, int] = field(default_factory=dict)
    recomputed: dict[PlacedValue, int] = field(default_factory=dict)
    partitioned: dict[tuple[PlacedValue, int], int] = field(default_factory=dict)
    partitioned_inputs: dict[tuple[PlacedValue, int], int] = field(default_factory=dict)
    seconds: list[tuple[int, StreamSeconds]] = field(default_factory=list)

    def offloaded_bytes(self) -> Expression:
        """Return the offloaded bytes of one call, in units of bytes."""
        return {variable: self.sizes[storage] for storage, variable in self.offloaded.items()}

    def held_bytes(self, axis_sizes: Sequence[int]) -> tuple[Expression, ...]:
        """Return the `HeldBytes` of one call, in units of bytes, on a mesh with axes of these sizes."""
        held = [(column, recomputed_bytes(self.sizes[storage])) for storage, column in self.recomputed.items()]
        held += [(column, offloaded_bytes(self.sizes[storage])) for storage, column in self.offloaded.items()]
        for (storage, axis), column in self.partitioned.items():
            held.append((column, partitioned_bytes(self.sizes[storage], axis_sizes[axis])))
            if (storage, axis) in self.partitioned_inputs:
                held.append((self.partitioned_inputs[storage, axis], HeldBytes(forward=self.sizes[storage])))
        return tuple({column: each[place] for column, each in held if each[place]} for place in range(3))


@dataclass(slots=True)
class Formulation:
    """The model and what its columns mean. Objective x `second_unit` are seconds, byte expressions x `byte_unit` are bytes.

    x[block, node][strategy], w[class][placement], y[block, value][edge], z[block][ZeRO stage]: columns. z[""] is the group of
    parameters that several calls share. states: the state of each kind of call, and under None of the shared parameters. forward,
    backward: per block the column of a call's seconds, and those on a link of the data axis. penalties: what the objective has
    beside seconds. storages: per block, where they are needed. overlap: h, per block, with the seconds of a
    unit (negative). boundary_saved: bytes saved of a tensor between calls, by the slots that may save it. excess,
    uneven_excess: see `memory_events.add_memory_constraint`.
    """

    problem: Problem
    second_unit: float
    byte_unit: float
    model: LinearModel = field(default_factory=LinearModel)
    x: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    w: dict[int, list[int]] = field(default_factory=dict)
    y: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    z: dict[str, dict[int, int]] = field(default_factory=dict)
    states: dict[CallKind | None, StateTerms] = field(default_factory=dict)
    forward: dict[str, tuple[int, Terms]] = field(default_factory=dict)
    backward: dict[str, tuple[int, Terms]] = field(default_factory=dict)
    penalties: dict[int, float] = field(default_factory=dict)
    storages: dict[str, StorageVariables] = field(default_factory=dict)
    boundary_saved: dict[frozenset[Slot], int] = field(default_factory=dict)
    overlap: dict[str, list[tuple[int, StreamSeconds]]] = field(default_factory=dict)
    excess: int = -1
    uneven_excess: int = -1

    def priced_columns(self, name: str) -> Iterator[tuple[int, StreamSeconds, str]]:
        """Yield x, y and h of a block, and r, c and P where it has storages, with their seconds in one call, and the operation
        (empty: a conversion)."""
        yield from self.placed_columns(name)
        storages = self.storages[name].seconds if name in self.storages else ()
        yield from ((column, seconds, "") for column, seconds in (*self.overlap.get(name, ()), *storages))

    def placed_columns(self, name: str) -> Iterator[tuple[int, StreamSeconds, str]]:
        """Yield x and y as `priced_columns`."""
        table = self.problem.blocks[name]
        for node, strategies in table.strategies.items():
            for strategy, x in zip(strategies, self.x[name, node], strict=True):
                yield x, strategy.seconds, node
        for value, conversions in table.conversions.items():
            for edge, y in zip(conversions.edges, self.y[name, value], strict=True):
                yield y, edge.seconds, ""
