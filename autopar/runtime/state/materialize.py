"""Fills a program with a model's state, and makes the canonical parameters: DTensors over the whole mesh under their original
names.

The program computes with plain local tensors. Where a block's state is sharded over the data axis (ZeRO-1 to 3), FSDP2 gathers
the weights and reduces the gradients; elsewhere gradient buckets reduce them. Canonical parameters share storage with what the
program stores, and gradients are moved to them, so that an optimizer over the canonical parameters trains the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..compat.dtensor import local_of
from ..device.mesh import MeshHandle
from ..module import ParameterSpec, Program, RootModule
from ..progress import working
from .fsdp import hoist_shared, shard_block, shard_root
from .gradient import own
from .gradient_buckets import GradientBuckets, redirect_gradients
from .layout import dtensor_placements, local_shape, model_shard, own_positions, zero_shard
from .loss_scale import LossScale
from .model_state import State
from .parameter_table import ParameterEntry, ParameterIndex, Table, by_block, parameter_index, parameter_tables, shared_entries
from .stage_tensors import Holders, OnAnotherStage, PipelineStages, on_another_stage
from .weight_source import OrderedSource, WeightInParts, WeightSource, checked_weight, refused_on_all_stages, whole_weight


def _fill_buffers(roots: Iterable[RootModule], source: WeightSource) -> tuple[dict[str, torch.Tensor], dict[str, ParameterSpec]]:
    """Buffers are replicated; a shared one is one tensor."""
    buffers: dict[str, torch.Tensor] = {}
    specs: dict[str, ParameterSpec] = {}
    for root in roots:
        for block in root.blocks():
            for spec in block.specs:
                if not spec.buffer:
                    continue
                name = block.original_names[spec.path]
                if name not in buffers:
                    specs[name] = spec
                    full = whole_weight(checked_weight(source, name, spec))
                    buffers[name] = full.to(root.mesh.device, getattr(torch, spec.dtype), copy=True)
                block.register_buffer(spec.attribute, buffers[name], persistent=spec.persistent)
    return buffers, specs


def materialize(program: Program, source: WeightSource) -> State:
    """Fill this rank's part of `program` block by block from full tensors, and shard each block's state before the next is
    filled."""
    mesh, index = program.mesh, parameter_index(program.roots())
    if mesh.pp.size > 1:
        source = OrderedSource(
            source, index.loading_order(), (n for n, ranks in index.holders.items() if mesh.pp.coordinate in ranks)
        )
    tables = parameter_tables(program.roots(), mesh)
    roots, own_tables = program.roots()[mesh.pp.coordinate], tables[mesh.pp.coordinate]
    builder = _StateBuilder(mesh, source)
    with refused_on_all_stages(mesh, source), working("loading weights", len(index.loading_order())):
        buffers, specs = _fill_buffers(roots, source)
        for table in own_tables:
            for entry in table.values():
                if entry.name in index.shared and (len(entry.blocks) > 1 or sum(entry.name in each for each in own_tables) > 1):
                    builder.fill(entry)
        for root, table in zip(roots, own_tables, strict=True):
            builder.shard(root, table)
    entries = builder.first
    common, chunk_buckets = _buckets(program, roots, own_tables, builder)
    copies = [(entries[entry.name].stored, entry.stored) for entry in builder.others]
    pipeline = PipelineStages(mesh) if mesh.pp.size > 1 else None
    parameters = {name: builder.canonical[name] for table in own_tables for name in table}
    for name, parameter in parameters.items():
        own(parameter, None if pipeline is None else Holders(pipeline, frozenset(index.holders[name])), name)
    return State(
        mesh=mesh,
        parameters=parameters,
        buffers=buffers,
        specs=specs | {name: entry.spec for name, entry in entries.items()},
        zero_dims={name: entry.zero_dim for stage in tables for table in stage for name, entry in table.items()},
        buckets=common,
        index=index,
        chunk_buckets=chunk_buckets,
        copies=tuple((first, second) for first, second in copies if first is not None and second is not None),
        roots=tuple(roots),
        tables=tuple(own_tables),
        pipeline=pipeline,
        elsewhere={} if pipeline is None else _of_other_stages(pipeline, index, {*parameters, *buffers}),
        loss_scale=LossScale(program.precision[0]),
    )


def _of_other_stages(pipeline: PipelineStages, index: ParameterIndex, held: Collection[str]) -> dict[str, OnAnotherStage]:
    """The parameters and buffers that this stage does not hold."""
    out = {}
    for name, spec in index.specs.items():
        if name in held:
            continue
        holders = Holders(pipeline, frozenset(index.holders[name]))
        each = out[name] = on_another_stage(spec.shape, getattr(torch, spec.dtype), holders)
        if not spec.buffer:
            each.requires_grad_(spec.trainable)
            each._is_param = True  # what isinstance(..., nn.Parameter) asks for
            own(each, holders, name)  # type: ignore[arg-type]
    return out


def _as_stored(shard: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether FSDP2 can copy its part from this tensor, so that of a mapped file no more than that part is read."""
    return shard.dtype == dtype and shard.device == device and shard.is_contiguous() and not shard.is_inference()


@dataclass
class _StateBuilder:
    """Parameters that are filled, by name: the first entry of each, its canonical parameter, and entries of further copies."""

    mesh: MeshHandle
    source: WeightSource
    first: Table = field(default_factory=dict)
    canonical: dict[str, nn.Parameter] = field(default_factory=dict)
    others: list[ParameterEntry] = field(default_factory=list)

    def fill(self, entry: ParameterEntry) -> None:
        """Put this rank's shard over the model axes into the blocks of a root that use it. All roots share one tensor of a
        replicated parameter."""
        before = self.first.get(entry.name)
        if before is None:
            shape, placements = entry.spec.shape, entry.spec.placements
            full = checked_weight(self.source, entry.name, entry.spec)
            dtype: torch.dtype = getattr(torch, entry.spec.dtype)
            if isinstance(full, WeightInParts):
                shard = torch.empty(local_shape(shape, placements, self.mesh), dtype=dtype, device=self.mesh.device)
                own = full.read(own_positions(shape, placements, self.mesh, entry.zero_dim))
                zero_shard(shard, entry.zero_dim, self.mesh).copy_(own)  # FSDP2 takes its part alone
            else:
                shard = model_shard(full.detach(), placements, self.mesh)
                if entry.zero_dim is None or not _as_stored(shard, dtype, self.mesh.device):
                    shard = torch.empty(shard.shape, dtype=dtype, device=self.mesh.device).copy_(shard)
            entry.stored = nn.Parameter(shard, requires_grad=entry.spec.trainable)
            self.first[entry.name] = entry
        else:
            assert before.stored is not None
            entry.stored = before.stored
            if entry.zero_dim is not None:
                entry.stored = nn.Parameter(before.stored.detach().clone(), requires_grad=entry.spec.trainable)
                self.others.append(entry)
        for block in entry.blocks:
            for spec in block.specs:
                if block.original_names[spec.path] == entry.name:
                    block.register_parameter(spec.attribute, entry.stored)

    def shard(self, root: RootModule, table: Table) -> None:
        """Fill the remaining parameters of a root and shard its state."""
        rooted = {entry.name: entry for entry in shared_entries(table) if entry.zero_dim is not None}
        hoist_shared(root, rooted)
        for block, entries in by_block(root, table).items():
            for entry in entries:
                if entry.stored is None:
                    self.fill(entry)
            shard_block(root, block, {entry.name: entry for entry in entries if entry.zero_dim is not None})
        if any(entry.zero_dim is not None for entry in table.values()):
            shard_root(root, rooted)
        for name, entry in table.items():
            if self.first[name] is entry:
                self.canonical[name] = _canonical(entry, self.mesh)
            elif entry.zero_dim is not None and entry.stored is not None:
                redirect_gradients(entry.stored, self.canonical[name])


def _canonical(entry: ParameterEntry, mesh: MeshHandle) -> nn.Parameter:
    """The DTensor of the original shape over what the program stores; gradients of FSDP2 parameters are redirected to it."""
    assert entry.stored is not None
    local = local_of(entry.stored)
    placements = dtensor_placements(entry.spec.shape, entry.spec.placements, mesh, entry.zero_dim)
    shape = torch.Size(entry.spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    full = DTensor.from_local(local, mesh.state_mesh, placements, run_check=False, shape=shape, stride=stride)
    canonical = nn.Parameter(full, requires_grad=entry.spec.trainable)
    if entry.zero_dim is not None:
        redirect_gradients(entry.stored, canonical)
    return canonical


def _buckets(
    program: Program, roots: tuple[RootModule, ...], own_tables: list[Table], builder: _StateBuilder
) -> tuple[GradientBuckets, tuple[GradientBuckets, ...]]:
    """Buckets for all that is replicated on the data axis: of the program, or shared by model chunks; and of each chunk."""
    group = builder.mesh.group("dp") if builder.mesh.dp.size > 1 else None
    shared = {name for table in own_tables for name in table if sum(name in each for each in own_tables) > 1}

    def members(entries: Iterable[ParameterEntry]) -> dict[nn.Parameter, nn.Parameter]:
        pairs = [(entry.stored, builder.canonical[entry.name]) for entry in entries if entry.zero_dim is None]
        return {stored: canonical for stored, canonical in pairs if stored is not None}

    each = []
    for root, table in zip(roots, own_tables, strict=True):
        own = {name: entry for name, entry in table.items() if name not in shared}
        each.append([members(entries) for entries in (*by_block(root, own).values(), shared_entries(own))])
    dtype = getattr(torch, program.reduce_dtype) if program.reduce_dtype else None
    if roots == (program,):
        return GradientBuckets(each[0], group, dtype=dtype), ()
    common = GradientBuckets([members(builder.first[name] for name in sorted(shared))], group, dtype=dtype)
    return common, tuple(GradientBuckets(groups, group, outlives_backward=True, dtype=dtype) for groups in each)
