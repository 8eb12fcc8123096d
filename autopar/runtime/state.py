"""Fills a program with a model's state and gives back canonical parameters: DTensors over the whole mesh, under original names.

The program computes with plain local tensors. Where a block's state is sharded over the data axis (zero >= 1) FSDP2 gathers and
reduces them; elsewhere buckets sum their gradients. Canonical parameters share storage with what the program stores, and
gradients are moved to them, so an optimizer over the canonical parameters trains the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .errors import StateProblem
from .gradients import Buckets, forward_sharded
from .layout import data_dim, data_part, dtensor_placements, local_part, whole
from .mesh import MeshHandle
from .module import Block, Parameter, Program
from .zero import hoist, shard_block, shard_root

Source = Callable[[str], torch.Tensor] | Mapping[str, torch.Tensor]


@dataclass(eq=False)
class Entry:
    """A parameter by its original name: its spec, ZeRO's dimension (None: replicated), and the blocks that use it."""

    name: str
    spec: Parameter
    dim: int | None
    uses: list[Block]
    stored: nn.Parameter | None = None
    canonical: nn.Parameter | None = None


@dataclass(frozen=True)
class State:
    """The canonical parameters and buffers of a program by original name."""

    mesh: MeshHandle
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    specs: dict[str, Parameter]
    dims: dict[str, int | None]
    buckets: Buckets

    def full(self, name: str, value: torch.Tensor | None = None) -> torch.Tensor:
        """The whole of a parameter, or of `value` placed like it (its gradient, a moment), on every rank; right for every layout.

        DTensor's own `full_tensor` fails on 2.13.0 where three mesh axes cut one tensor, or two cut a strided dimension.
        """
        if name in self.buffers:
            return self.buffers[name].clone()
        spec, local = self.specs[name], _local(self.parameters[name] if value is None else value)
        return whole(local, spec.shape, spec.placements, self.mesh, self.dims[name])

    def load_full(self, source: Source) -> None:
        """Copies full tensors into the local pieces, in place."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                piece = local_part(_full(source, name, self.specs[name]), self.specs[name].placements, self.mesh)
                _local(parameter).copy_(data_part(piece, self.dims[name], self.mesh))
            for name, buffer in self.buffers.items():
                buffer.copy_(_full(source, name, self.specs[name]))


def _local(parameter: torch.Tensor) -> torch.Tensor:
    assert isinstance(parameter, DTensor)
    with torch.no_grad():
        return parameter.to_local()


def _full(source: Source, name: str, spec: Parameter) -> torch.Tensor:
    try:
        full = source[name] if isinstance(source, Mapping) else source(name)
    except KeyError:
        raise StateProblem(f"the state has no {name!r}; pass the state dict of the model that was planned") from None
    if tuple(full.shape) != tuple(spec.shape):
        raise StateProblem(f"{name} has shape {tuple(full.shape)} but the plan is for {tuple(spec.shape)}")
    return full.detach()


def _entries(program: Program) -> dict[str, Entry]:
    """All parameters by name. A tied one is as strongly sharded as the strongest of its blocks."""
    out: dict[str, Entry] = {}
    for block in program.blocks():
        for spec in block.specs:
            if spec.buffer:
                continue
            name = block.original[spec.path]
            dim = data_dim(spec.shape, spec.placements, program.mesh) if block.zero and program.mesh.shard.size > 1 else None
            entry = out.setdefault(name, Entry(name, spec, dim, []))
            if (entry.spec.shape, dict(entry.spec.placements)) != (spec.shape, dict(spec.placements)):
                raise StateProblem(f"{name} is stored in two ways by {entry.uses[0].prefix!r} and {block.prefix!r}: plan again")
            entry.dim = entry.dim if entry.dim is not None else dim
            entry.uses.append(block)
    return out


def _one_dtype(entries: Iterable[Entry]) -> None:
    """FSDP2 takes one dtype per group: entries of others than the largest become replicated."""
    sizes: dict[str, int] = {}
    sharded = [entry for entry in entries if entry.dim is not None]
    for entry in sharded:
        sizes[entry.spec.dtype] = sizes.get(entry.spec.dtype, 0) + torch.Size(entry.spec.shape).numel()
    for entry in sharded:
        if entry.spec.dtype != max(sizes, key=lambda dtype: sizes[dtype]):
            entry.dim = None


def _fill(entry: Entry, source: Source, mesh: MeshHandle) -> None:
    """Puts this rank's piece, before ZeRO, into the blocks that use it."""
    piece = local_part(_full(source, entry.name, entry.spec), entry.spec.placements, mesh)
    dtype: torch.dtype = getattr(torch, entry.spec.dtype)
    data = torch.empty(piece.shape, dtype=dtype, device=mesh.device).copy_(piece)
    entry.stored = nn.Parameter(data, requires_grad=entry.spec.trainable)
    for block in entry.uses:
        for spec in block.specs:
            if block.original[spec.path] == entry.name:
                block.register_parameter(spec.attribute, entry.stored)


def _fill_buffers(program: Program, source: Source) -> tuple[dict[str, torch.Tensor], dict[str, Parameter]]:
    """Buffers are replicated; a shared one is one tensor."""
    buffers: dict[str, torch.Tensor] = {}
    specs: dict[str, Parameter] = {}
    for block in program.blocks():
        for spec in block.specs:
            if not spec.buffer:
                continue
            name = block.original[spec.path]
            if name not in buffers:
                specs[name] = spec
                buffers[name] = _full(source, name, spec).to(program.mesh.device, getattr(torch, spec.dtype), copy=True)
            block.register_buffer(spec.attribute, buffers[name], persistent=spec.persistent)
    return buffers, specs


def materialize(program: Program, source: Source) -> State:
    """Fills `program` block by block from full tensors and shards each block's state before the next is filled."""
    mesh, entries = program.mesh, _entries(program)
    by_block = [(block, [entry for entry in entries.values() if entry.uses == [block]]) for block in program.blocks()]
    tied = [entry for entry in entries.values() if len(entry.uses) > 1]
    for group in (*(mine for _, mine in by_block), tied):
        _one_dtype(group)
    buffers, specs = _fill_buffers(program, source)
    for entry in tied:
        _fill(entry, source, mesh)
    rooted = {entry.name: entry for entry in tied if entry.dim is not None}
    hoist(program, rooted)
    for block, mine in by_block:
        for entry in mine:
            _fill(entry, source, mesh)
        shard_block(block, {entry.name: entry for entry in mine if entry.dim is not None}, program.precision)
    if any(entry.dim is not None for entry in entries.values()):
        shard_root(program, rooted)
    specs |= {name: entry.spec for name, entry in entries.items()}
    return State(
        mesh,
        {name: _canonical(entry, mesh) for name, entry in entries.items()},
        buffers,
        specs,
        {name: entry.dim for name, entry in entries.items()},
        _buckets([mine for _, mine in by_block] + [tied], mesh),
    )


def _canonical(entry: Entry, mesh: MeshHandle) -> nn.Parameter:
    """The DTensor of the original shape over what the program stores; gradients of sharded parameters are led to it."""
    assert entry.stored is not None
    local = _local(entry.stored) if isinstance(entry.stored, DTensor) else entry.stored.detach()
    placements = dtensor_placements(entry.spec.shape, entry.spec.placements, mesh, entry.dim)
    shape = torch.Size(entry.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    whole = DTensor.from_local(local, mesh.state_mesh, placements, run_check=False, shape=shape, stride=stride)
    entry.canonical = nn.Parameter(whole, requires_grad=entry.spec.trainable)
    if entry.dim is not None:
        forward_sharded(entry.stored, entry.canonical)
    return entry.canonical


def _buckets(groups: Iterable[Iterable[Entry]], mesh: MeshHandle) -> Buckets:
    """Buckets for all that is replicated on the data axis."""
    members = []
    for group in groups:
        pairs = [(entry.stored, entry.canonical) for entry in group if entry.dim is None]
        members.append({stored: canonical for stored, canonical in pairs if stored is not None and canonical is not None})
    return Buckets(members, mesh.group("dp") if mesh.dp.size > 1 else None)
