"""Fills a program with a model's state and gives back canonical parameters: DTensors over the whole mesh, under original names.

The program computes with plain local tensors. Where a block's state is sharded over the data axis (zero >= 1) FSDP2 gathers and
reduces them; elsewhere buckets sum their gradients. Canonical parameters share storage with what the program stores, and
gradients are moved to them, so an optimizer over the canonical parameters trains the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .entries import Entry, Spread, Table, by_block, spread, tables, tied
from .errors import StateProblem
from .gradients import Buckets, forward_sharded
from .layout import data_part, dtensor_placements, local_part, whole
from .mesh import MeshHandle
from .module import Parameter, Program, Root
from .source import InTurn, Source, ask
from .zero import hoist, shard_block, shard_root


@dataclass(frozen=True)
class State:
    """The canonical parameters and buffers of a program by original name.

    `buckets` are those of the program, in a pipeline those of what several chunks share; `of_chunks` those of each chunk.
    `copies`: a sharded parameter that two chunks of this rank use is stored twice, and the second follows the first.
    """

    mesh: MeshHandle
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    specs: dict[str, Parameter]
    dims: dict[str, int | None]
    buckets: Buckets
    spread: Spread
    of_chunks: tuple[Buckets, ...] = ()
    copies: tuple[tuple[nn.Parameter, nn.Parameter], ...] = ()

    def full(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """The whole of a parameter, or of `value` placed like it (its gradient, a moment), on every rank of the stage that has
        it; right for every layout.

        DTensor's own `full_tensor` fails on 2.13.0 where three mesh axes cut one tensor, or two cut a strided dimension.
        """
        if name in self.buffers:
            return self.buffers[name].clone(memory_format=torch.contiguous_format)  # as others have room for it
        spec, local = self.specs[name], _local(self.parameters[name] if value is None else value)
        return whole(local, spec.shape, spec.placements, self.mesh, self.dims[name])

    def everywhere(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """`full`, on the ranks of all stages; those that have not the parameter give no value."""
        pp, holder = self.mesh.pp, self.spread.holders[name][0]
        if pp.coordinate == holder:
            full = self.full(name, value)
        else:
            spec = self.spread.specs[name]
            full = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.mesh.device)
        if pp.size > 1:
            dist.broadcast(full, self.mesh.global_rank(holder), self.mesh.group(pp.name))
        return full

    def anywhere(self, mine: Collection[str]) -> list[str]:
        """The parameters that are in `mine` on any stage, in the model's order."""
        names = [name for name, spec in self.spread.specs.items() if not spec.buffer]
        found = torch.tensor([name in mine for name in names], dtype=torch.int32, device=self.mesh.device)
        if self.mesh.pp.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, self.mesh.group(self.mesh.pp.name))
        return [name for name, flag in zip(names, found.tolist(), strict=True) if flag]

    def load_full(self, source: Source) -> None:
        """Copies full tensors into the local pieces, in place."""
        if self.mesh.pp.size > 1:
            source = InTurn(source, self.spread.in_turn(), self.specs)
        with torch.no_grad(), _together(self.mesh, source):
            for name, buffer in self.buffers.items():
                buffer.copy_(_full(source, name, self.specs[name]))
            for name, parameter in self.parameters.items():
                piece = local_part(_full(source, name, self.specs[name]), self.specs[name].placements, self.mesh)
                _local(parameter).copy_(data_part(piece, self.dims[name], self.mesh))

    def follow(self) -> None:
        """Before a step: second copies get the values of the first."""
        with torch.no_grad():
            for first, second in self.copies:
                _local(second).copy_(_local(first))


@contextlib.contextmanager
def _together(mesh: MeshHandle, source: Source) -> Iterator[None]:
    """A state that one stage cannot take is refused by all."""
    problem: StateProblem | None = None
    try:
        yield
    except StateProblem as error:
        problem = error
    if isinstance(source, InTurn):
        source.finish()
        if dist.get_backend() != "fake":
            refused = torch.tensor(0 if problem is None else 1 + mesh.pp.coordinate, device=mesh.device)
            dist.all_reduce(refused, dist.ReduceOp.MAX, mesh.group(mesh.pp.name))
            if problem is None and int(refused):
                problem = StateProblem(f"stage {int(refused) - 1} refuses the state: see the error of its ranks")
    if problem is not None:
        raise problem


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        return parameter.to_local()


def _full(source: Source, name: str, spec: Parameter) -> torch.Tensor:
    full = ask(source, name)
    if tuple(full.shape) != tuple(spec.shape):
        raise StateProblem(f"{name} has shape {tuple(full.shape)} but the plan is for {tuple(spec.shape)}")
    return full.detach()


def _fill_buffers(roots: Iterable[Root], source: Source) -> tuple[dict[str, torch.Tensor], dict[str, Parameter]]:
    """Buffers are replicated; a shared one is one tensor."""
    buffers: dict[str, torch.Tensor] = {}
    specs: dict[str, Parameter] = {}
    for root in roots:
        for block in root.blocks():
            for spec in block.specs:
                if not spec.buffer:
                    continue
                name = block.original[spec.path]
                if name not in buffers:
                    specs[name] = spec
                    buffers[name] = _full(source, name, spec).to(root.mesh.device, getattr(torch, spec.dtype), copy=True)
                block.register_buffer(spec.attribute, buffers[name], persistent=spec.persistent)
    return buffers, specs


def materialize(program: Program, source: Source) -> State:
    """Fills this rank's part of `program` block by block from full tensors and shards each block's state before the next is
    filled."""
    mesh, spreading = program.mesh, spread(program.roots())
    if mesh.pp.size > 1:
        source = InTurn(source, spreading.in_turn(), (n for n, ranks in spreading.holders.items() if mesh.pp.coordinate in ranks))
    roots, mine = program.roots()[mesh.pp.coordinate], tables(program.roots(), mesh)[mesh.pp.coordinate]
    filling = _Filling(mesh, source)
    with _together(mesh, source):
        buffers, specs = _fill_buffers(roots, source)
        for table in mine:
            for entry in table.values():
                if entry.name in spreading.repeated and (len(entry.uses) > 1 or sum(entry.name in each for each in mine) > 1):
                    filling.fill(entry)
        for root, table in zip(roots, mine, strict=True):
            filling.shard(root, table)
    entries = filling.first
    specs |= {name: entry.spec for name, entry in entries.items()}
    return State(
        mesh,
        {name: filling.canonical[name] for table in mine for name in table},
        buffers,
        specs,
        {name: entry.dim for name, entry in entries.items()},
        *_buckets(program, roots, mine, filling),
    )


@dataclass
class _Filling:
    """Parameters that are filled, by name: the first entry of each, what is known under its name, and further copies."""

    mesh: MeshHandle
    source: Source
    first: Table = field(default_factory=dict)
    canonical: dict[str, nn.Parameter] = field(default_factory=dict)
    others: list[Entry] = field(default_factory=list)

    def fill(self, entry: Entry) -> None:
        """Puts this rank's piece, before ZeRO, into the blocks of a root that use it. A replicated one is one for all roots."""
        known = self.first.get(entry.name)
        if known is None:
            piece = local_part(_full(self.source, entry.name, entry.spec), entry.spec.placements, self.mesh)
            dtype: torch.dtype = getattr(torch, entry.spec.dtype)
            data = torch.empty(piece.shape, dtype=dtype, device=self.mesh.device).copy_(piece)
            entry.stored = nn.Parameter(data, requires_grad=entry.spec.trainable)
            self.first[entry.name] = entry
        else:
            assert known.stored is not None
            entry.stored = known.stored
            if entry.dim is not None:
                entry.stored = nn.Parameter(known.stored.detach().clone(), requires_grad=entry.spec.trainable)
                self.others.append(entry)
        for block in entry.uses:
            for spec in block.specs:
                if block.original[spec.path] == entry.name:
                    block.register_parameter(spec.attribute, entry.stored)

    def shard(self, root: Root, table: Table) -> None:
        """Fills what is left of a root and shards its state."""
        rooted = {entry.name: entry for entry in tied(table) if entry.dim is not None}
        hoist(root, rooted)
        for block, entries in by_block(root, table).items():
            for entry in entries:
                if entry.stored is None:
                    self.fill(entry)
            shard_block(block, {entry.name: entry for entry in entries if entry.dim is not None}, root.precision)
        if any(entry.dim is not None for entry in table.values()):
            shard_root(root, rooted)
        for name, entry in table.items():
            if self.first[name] is entry:
                self.canonical[name] = _canonical(entry, self.mesh)
            elif entry.dim is not None and entry.stored is not None:
                forward_sharded(entry.stored, self.canonical[name])


def _canonical(entry: Entry, mesh: MeshHandle) -> nn.Parameter:
    """The DTensor of the original shape over what the program stores; gradients of sharded parameters are led to it."""
    assert entry.stored is not None
    local = _local(entry.stored) if isinstance(entry.stored, DTensor) else entry.stored.detach()
    placements = dtensor_placements(entry.spec.shape, entry.spec.placements, mesh, entry.dim)
    shape = torch.Size(entry.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh.state_mesh, placements, run_check=False, shape=shape, stride=stride)
    canonical = nn.Parameter(whole, requires_grad=entry.spec.trainable)
    if entry.dim is not None:
        forward_sharded(entry.stored, canonical)
    return canonical


def _buckets(
    program: Program, roots: tuple[Root, ...], mine: list[Table], filling: _Filling
) -> tuple[Buckets, Spread, tuple[Buckets, ...], tuple[tuple[nn.Parameter, nn.Parameter], ...]]:
    """Buckets for all that is replicated on the data axis, and what else a state has of several chunks."""
    group = filling.mesh.group("dp") if filling.mesh.dp.size > 1 else None
    shared = {name for table in mine for name in table if sum(name in each for each in mine) > 1}

    def members(entries: Iterable[Entry]) -> dict[nn.Parameter, nn.Parameter]:
        pairs = [(entry.stored, filling.canonical[entry.name]) for entry in entries if entry.dim is None]
        return {stored: canonical for stored, canonical in pairs if stored is not None}

    each = []
    for root, table in zip(roots, mine, strict=True):
        own = {name: entry for name, entry in table.items() if name not in shared}
        each.append([members(entries) for entries in (*by_block(root, own).values(), tied(own))])
    spreading = spread(program.roots())
    if roots == (program,):
        return Buckets(each[0], group), spreading, (), ()
    common = Buckets([members(filling.first[name] for name in sorted(shared))], group)
    copies = [(filling.first[entry.name].stored, entry.stored) for entry in filling.others]
    pairs = tuple((first, second) for first, second in copies if first is not None and second is not None)
    return common, spreading, tuple(Buckets(groups, group, lasting=True) for groups in each), pairs
