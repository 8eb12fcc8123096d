"""What a program stores: each parameter of each block once by its original name, and how far its state is cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .errors import StateProblem
from .layout import data_dim
from .mesh import MeshHandle
from .module import Block, Parameter, Root


@dataclass(eq=False)
class Entry:
    """A parameter of one root by its original name: its spec, ZeRO's dimension (None: replicated), and the blocks that use it."""

    name: str
    spec: Parameter
    dim: int | None
    uses: list[Block]
    stored: nn.Parameter | None = None


Table = dict[str, Entry]
"""The parameters of one root."""


def tables(roots: Sequence[Sequence[Root]], mesh: MeshHandle) -> list[list[Table]]:
    """Of every root of every pipeline rank. A tied parameter is everywhere as strongly sharded as the strongest of its blocks."""
    out = [[_table(root, mesh) for root in mine] for mine in roots]
    everywhere: dict[str, list[Entry]] = {}
    for table in (table for mine in out for table in mine):
        for name, entry in table.items():
            everywhere.setdefault(name, []).append(entry)
    for entries in everywhere.values():
        dim = next((entry.dim for entry in entries if entry.dim is not None), None)
        for entry in entries:
            _same(entries[0], entry.spec, entry.uses[0])
            entry.dim = dim
    for root, table in zip((root for mine in roots for root in mine), (table for mine in out for table in mine), strict=True):
        for group in (*by_block(root, table).values(), tied(table)):
            _one_dtype(group)
    for entries in everywhere.values():
        if any(entry.dim is None for entry in entries):
            for entry in entries:
                entry.dim = None
    return out


def _table(root: Root, mesh: MeshHandle) -> Table:
    out: Table = {}
    for block in root.blocks():
        for spec in block.specs:
            if spec.buffer:
                continue
            name = block.original[spec.path]
            dim = data_dim(spec.shape, spec.placements, mesh) if block.zero and mesh.shard.size > 1 else None
            entry = out.setdefault(name, Entry(name, spec, dim, []))
            _same(entry, spec, block)
            entry.dim = entry.dim if entry.dim is not None else dim
            entry.uses.append(block)
    return out


def _same(entry: Entry, spec: Parameter, block: Block) -> None:
    if (entry.spec.shape, dict(entry.spec.placements)) != (spec.shape, dict(spec.placements)):
        raise StateProblem(f"{entry.name} is stored in two ways by {entry.uses[0].prefix!r} and {block.prefix!r}: plan again")


def by_block(root: Root, table: Table) -> dict[Block, list[Entry]]:
    """The parameters that only one block of the root uses."""
    return {block: [entry for entry in table.values() if entry.uses == [block]] for block in root.blocks()}


def tied(table: Table) -> list[Entry]:
    """Those that several uses in the root share."""
    return [entry for entry in table.values() if len(entry.uses) > 1]


def _one_dtype(entries: Iterable[Entry]) -> None:
    """FSDP2 takes one dtype per group: entries of others than the largest become replicated."""
    sizes: dict[str, int] = {}
    sharded = [entry for entry in entries if entry.dim is not None]
    for entry in sharded:
        sizes[entry.spec.dtype] = sizes.get(entry.spec.dtype, 0) + torch.Size(entry.spec.shape).numel()
    for entry in sharded:
        if entry.spec.dtype != max(sizes, key=lambda dtype: sizes[dtype]):
            entry.dim = None


@dataclass(frozen=True)
class Spread:
    """All names of the whole program: specs, and the pipeline ranks that hold each, ascending."""

    specs: dict[str, Parameter]
    holders: dict[str, tuple[int, ...]]
    repeated: frozenset[str]
    """Parameters that several uses share, on one rank or on several."""

    def in_turn(self) -> list[str]:
        """The order in which `state` asks for full tensors: buffers, shared parameters, the others."""
        buffers = [name for name, spec in self.specs.items() if spec.buffer]
        parameters = [name for name, spec in self.specs.items() if not spec.buffer]
        return [*buffers, *sorted(parameters, key=lambda name: name not in self.repeated)]


def spread(roots: Sequence[Sequence[Root]]) -> Spread:
    """Chunk after chunk in the model's order, whoever holds it."""
    specs: dict[str, Parameter] = {}
    holders: dict[str, set[int]] = {}
    uses: dict[str, int] = {}
    order = sorted(((root.position, rank, root) for rank, mine in enumerate(roots) for root in mine), key=lambda item: item[:2])
    for _, rank, root in order:
        for block in root.blocks():
            for spec in block.specs:
                name = block.original[spec.path]
                specs.setdefault(name, spec)
                holders.setdefault(name, set()).add(rank)
                uses[name] = uses.get(name, 0) + 1
    repeated = frozenset(name for name, count in uses.items() if count > 1 and not specs[name].buffer)
    return Spread(specs, {name: tuple(sorted(ranks)) for name, ranks in holders.items()}, repeated)
