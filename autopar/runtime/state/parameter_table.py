"""The parameter table: each parameter of each FSDP2 root once by its original name, and how its state is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..device.mesh import MeshHandle
from ..errors import StateError
from ..module import BlockModule, ParameterSpec, RootModule
from .layout import zero_dim


@dataclass(eq=False)
class ParameterEntry:
    """A parameter of one root by its original name: its spec, the dimension that ZeRO shards (None: replicated), and its
    blocks."""

    name: str
    spec: ParameterSpec
    zero_dim: int | None
    blocks: list[BlockModule]
    stored: nn.Parameter | None = None


Table = dict[str, ParameterEntry]
"""The parameters of one root."""


def parameter_tables(roots: Sequence[Sequence[RootModule]], mesh: MeshHandle) -> list[list[Table]]:
    """The tables of every root of every stage. A tied parameter is sharded everywhere if ZeRO shards it in any of its blocks, and
    replicated everywhere if it has to be in any."""
    out = [[_table(root, mesh) for root in stage] for stage in roots]
    by_name: dict[str, list[ParameterEntry]] = {}
    for table in (table for stage in out for table in stage):
        for name, entry in table.items():
            by_name.setdefault(name, []).append(entry)
    for entries in by_name.values():
        dim = next((entry.zero_dim for entry in entries if entry.zero_dim is not None), None)
        for entry in entries:
            _check_same(entries[0], entry.spec, entry.blocks[0])
            entry.zero_dim = dim
    for root, table in zip((root for stage in roots for root in stage), (table for stage in out for table in stage), strict=True):
        for group in (*by_block(root, table).values(), shared_entries(table)):
            _one_dtype(group)
    for entries in by_name.values():
        if any(entry.zero_dim is None for entry in entries):
            for entry in entries:
                entry.zero_dim = None
    return out


def _table(root: RootModule, mesh: MeshHandle) -> Table:
    out: Table = {}
    for block in root.blocks():
        for spec in block.specs:
            if spec.buffer:
                continue
            name = block.original_names[spec.path]
            dim = zero_dim(spec.shape, spec.placements, mesh) if block.zero and mesh.shard_axis.size > 1 else None
            entry = out.setdefault(name, ParameterEntry(name, spec, dim, []))
            _check_same(entry, spec, block)
            entry.zero_dim = entry.zero_dim if entry.zero_dim is not None else dim
            entry.blocks.append(block)
    return out


def _check_same(entry: ParameterEntry, spec: ParameterSpec, block: BlockModule) -> None:
    if (entry.spec.shape, dict(entry.spec.placements)) != (spec.shape, dict(spec.placements)):
        raise StateError(f"{entry.name} is stored in two ways by {entry.blocks[0].prefix!r} and {block.prefix!r}: plan again")


def by_block(root: RootModule, table: Table) -> dict[BlockModule, list[ParameterEntry]]:
    """The parameters that only one block of the root uses."""
    return {block: [entry for entry in table.values() if entry.blocks == [block]] for block in root.blocks()}


def shared_entries(table: Table) -> list[ParameterEntry]:
    """The parameters that several blocks of the root use."""
    return [entry for entry in table.values() if len(entry.blocks) > 1]


def _one_dtype(entries: Iterable[ParameterEntry]) -> None:
    """FSDP2 takes one dtype per group of what trains: trainable entries of other dtypes than the largest become replicated."""
    sizes: dict[str, int] = {}
    sharded = [entry for entry in entries if entry.zero_dim is not None and entry.spec.trainable]
    for entry in sharded:
        sizes[entry.spec.dtype] = sizes.get(entry.spec.dtype, 0) + torch.Size(entry.spec.shape).numel()
    for entry in sharded:
        if entry.spec.dtype != max(sizes, key=lambda dtype: sizes[dtype]):
            entry.zero_dim = None


@dataclass(frozen=True)
class ParameterIndex:
    """All names of the whole program: specs, and the stages that hold each, ascending."""

    specs: dict[str, ParameterSpec]
    holders: dict[str, tuple[int, ...]]
    shared: frozenset[str]
    """Parameters that several blocks use, on one stage or on several."""

    def loading_order(self) -> list[str]:
        """The order in which `materialize` asks for full tensors: buffers, shared parameters, the others."""
        buffers = [name for name, spec in self.specs.items() if spec.buffer]
        parameters = [name for name, spec in self.specs.items() if not spec.buffer]
        return [*buffers, *sorted(parameters, key=lambda name: name not in self.shared)]


def parameter_index(roots: Sequence[Sequence[RootModule]]) -> ParameterIndex:
    """The index over all model chunks in the model's order, whichever stage holds them."""
    specs: dict[str, ParameterSpec] = {}
    holders: dict[str, set[int]] = {}
    uses: dict[str, int] = {}
    order = sorted(((root.position, rank, root) for rank, stage in enumerate(roots) for root in stage), key=lambda item: item[:2])
    for _, rank, root in order:
        for block in root.blocks():
            for spec in block.specs:
                name = block.original_names[spec.path]
                specs.setdefault(name, spec)
                holders.setdefault(name, set()).add(rank)
                uses[name] = uses.get(name, 0) + 1
    repeated = frozenset(name for name, count in uses.items() if count > 1 and not specs[name].buffer)
    return ParameterIndex(specs, {name: tuple(sorted(ranks)) for name, ranks in holders.items()}, repeated)
