"""Fills a program with a model's state, and makes the canonical parameters: DTensors over the whole mesh under their original
names.

The program computes with plain local tensors. Where a block's state is sharded over the data axis (ZeRO-1 to 3), FSDP2 gathers
the weights and reduces the gradients; elsewhere gradient buckets reduce them. Canonical parameters share storage with what the
program stores, and gradients are moved to them, so that an optimizer over the canonical parameters trains the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..comm.agreement import gather, refused_together
from ..compat.autograd import has_data
from ..compat.dtensor import local_of
from ..device.mesh import MeshHandle
from ..errors import StateError
from ..module import ParameterSpec, Program, RootModule
from ..progress import advance, working
from .fsdp import hoist_shared, shard_block, shard_root
from .gradient import name_of, own
from .gradient_buckets import GradientBuckets, redirect_gradients
from .layout import dtensor_placements, gather_full, local_shape, model_shard, own_positions, zero_shard
from .loss_scale import LossScale
from .parameter_table import ParameterEntry, ParameterIndex, Table, by_block, parameter_index, parameter_tables, shared_entries
from .stage_tensors import Holders, OnAnotherStage, PipelineStages, holders_of, on_another_stage
from .weight_source import OrderedSource, Weight, WeightInParts, WeightSource, full_weight, whole_weight


class Slice(NamedTuple):
    """The `length` elements from `start` on along a dimension."""

    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class State:
    """The canonical parameters and buffers of a program by original name.

    `buckets`: the gradient buckets of the program; in a pipeline those of parameters that several model chunks of this rank
    share, while
    `chunk_buckets` are those of each chunk. `copies`: a sharded parameter that two chunks of this rank use is stored twice, as
    (first, second); the second gets the first's values before each step. `zero_dims`: the dimension that ZeRO shards, of the
    parameters of all stages.
    `roots`: the FSDP2 roots of this rank, and `tables` the parameters of each. `expert_orders`: of parameters whose experts were
    placed anew the expert in each slot of dimension 0 (`expert_placement`). `tied`: further names of tied tensors, each with the
    first; of an exported program, where no plain model knows them. `elsewhere`: parameters and buffers of other stages of the
    `pipeline`, without elements. `unused`: parameters that no program reads, replicated.
    """

    mesh: MeshHandle
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    specs: dict[str, ParameterSpec]
    zero_dims: dict[str, int | None]
    buckets: GradientBuckets
    index: ParameterIndex
    chunk_buckets: tuple[GradientBuckets, ...] = ()
    copies: tuple[tuple[nn.Parameter, nn.Parameter], ...] = ()
    roots: tuple[RootModule, ...] = ()
    tables: tuple[Table, ...] = ()
    pipeline: PipelineStages | None = None
    elsewhere: dict[str, OnAnotherStage] = field(default_factory=dict)
    unused: dict[str, nn.Parameter] = field(default_factory=dict)
    loss_scale: LossScale = field(default_factory=lambda: LossScale(""))
    expert_orders: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def every_parameter(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages, those of other ones without elements, and those that no program reads, in one order on
        all ranks."""
        both: dict[str, Any] = {**self.elsewhere, **self.parameters}
        return {**{name: both[name] for name, spec in self.index.specs.items() if not spec.buffer}, **self.unused}

    @property
    def every_buffer(self) -> dict[str, torch.Tensor]:
        """The buffers of all stages, those of other ones without elements."""
        return {**self.buffers, **{name: each for name, each in self.elsewhere.items() if self.index.specs[name].buffer}}

    def holders_of(self, name: str) -> Holders | None:
        """Return the stages of the pipeline that hold a parameter or buffer."""
        stages = self.index.holders.get(name)
        return None if self.pipeline is None or stages is None else Holders(self.pipeline, frozenset(stages))

    def full(
        self, name: str, value: torch.Tensor | None = None, dtype: torch.dtype | None = None, part: Slice | None = None
    ) -> torch.Tensor:
        """Return the full tensor of a parameter or buffer, or of `value` that is placed like it (its gradient, an optimizer
        state), on every rank of the stage that has it; correct for every layout. With `part` a slice of a dimension that nothing
        shards.

        DTensor's own `full_tensor` fails on 2.13.0 where three mesh axes shard one tensor, or two shard a strided dimension.
        """
        spec, shape = self.specs[name], list(self.specs[name].shape)
        local = local_of(self.buffers[name] if spec.buffer else self.parameters[name] if value is None else value)
        if part is not None:
            local, shape[part.dim] = local.narrow(*part), part.length
        local = local.to(dtype or local.dtype)
        if spec.buffer:
            return local.clone(memory_format=torch.contiguous_format)  # in the layout that other ranks receive into
        full = gather_full(local, shape, spec.placements, self.mesh, self.zero_dims[name])
        return full.index_select(0, self.expert_orders[name].argsort()) if name in self.expert_orders else full

    def broadcast_full(
        self, name: str, value: torch.Tensor | None = None, dtype: torch.dtype | None = None, part: Slice | None = None
    ) -> torch.Tensor:
        """Return `full` on the ranks of all stages; stages without the parameter pass no value."""
        pp, holder = self.mesh.pp, self.index.holders[name][0]
        if pp.coordinate == holder:
            full = self.full(name, value, dtype, part)
        else:
            spec, shape = self.index.specs[name], list(self.index.specs[name].shape)
            if part is not None:
                shape[part.dim] = part.length
            full = torch.empty(shape, dtype=dtype or getattr(torch, spec.dtype), device=self.mesh.device)
        if pp.size > 1:
            dist.broadcast(full, self.mesh.rank_in_stage(holder), self.mesh.group(pp.name))
        return full

    def trains(self) -> bool:
        """Return whether any parameter of this stage takes gradients."""
        return any(each.requires_grad for each in self.parameters.values())

    def on_all_stages(self, value: Any) -> list[Any]:
        """Return the value of each stage (all ranks must call)."""
        pp = self.mesh.pp
        return gather(value, self.mesh.group(pp.name)) if pp.size > 1 else [value]

    def names_on_any_stage(self, held: Collection[str]) -> list[str]:
        """The parameters that are in `held` on any stage, in the model's order; all of them in a dry run."""
        names = [name for name, spec in self.index.specs.items() if not spec.buffer]
        flags = torch.tensor([name in held for name in names], dtype=torch.int32, device=self.mesh.device)
        if not has_data(flags):
            return names
        if self.mesh.pp.size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, self.mesh.group(self.mesh.pp.name))
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def gradients_elsewhere(self, here: Collection[nn.Parameter], reached: dict[Any, list[str]] | None = None) -> dict[Any, Any]:
        """Return gradients for the parameters of other stages that a backward reached; `here`: those that it reached of this one.
        `reached`: names by the parameters that train, where a program reaches the same ones each time. All ranks must call."""
        if self.pipeline is None:
            return {}
        every = self.every_parameter
        known: dict[Any, list[str]] = {} if reached is None else reached
        trained = frozenset(name for name, each in every.items() if each.requires_grad)
        if trained not in known:
            known[trained] = self.names_on_any_stage({name for name, each in self.parameters.items() if each in here})
        away: list[Any] = [every[name] for name in known[trained] if name in trained and name not in self.parameters]
        for each in away:
            if not each._post_accumulate_grad_hooks:  # it did not train at first
                own(each, holders_of(each), name_of(each))
        return {each: on_another_stage(each.shape, each.dtype, holders_of(each)) for each in away}  # type: ignore[arg-type]

    def load_full(self, source: WeightSource, names: Collection[str] | None = None) -> None:
        """Copy full tensors into the local shards, in place: all, or those of `names` (the same on every rank)."""
        if self.mesh.pp.size > 1:
            order = [name for name in self.index.loading_order() if names is None or name in names]
            source = OrderedSource(source, order, self.specs)
        with torch.no_grad(), _refused_together(self.mesh, source), working("loading weights", len(self.specs)):
            for name, held in (*self.buffers.items(), *self.parameters.items()):
                if names is not None and name not in names:
                    continue
                full = _checked_weight(source, name, self.specs[name])
                if name in self.buffers:
                    held.copy_(whole_weight(full))
                else:
                    local_of(held).copy_(self.local_part(name, full))

    def local_part(self, name: str, full: Weight) -> torch.Tensor:
        """This rank's part of a full tensor that is placed like the parameter."""
        placements, zero, order = self.specs[name].placements, self.zero_dims[name], self.expert_orders.get(name)
        if isinstance(full, WeightInParts):
            return full.read(own_positions(full.shape, placements, self.mesh, zero, order))
        if order is not None:
            full = full.index_select(0, order.to(full.device))
        return zero_shard(model_shard(full, placements, self.mesh), zero, self.mesh)

    def holds(self, name: str, full: torch.Tensor) -> bool:
        """Return whether this rank's part of a tensor is that of `full`; so are those of tensors that are on other stages."""
        if name in self.buffers:
            own, value = self.buffers[name], full
        elif name in self.parameters:
            own, value = local_of(self.parameters[name]), self.local_part(name, full)
        else:
            return True
        return torch.equal(own, value.to(own.device, own.dtype))

    def sync_copies(self) -> None:
        """Give second copies the values of the first, before a step."""
        with torch.no_grad():
            for first, second in self.copies:
                local_of(second).copy_(local_of(first))


@contextlib.contextmanager
def _refused_together(mesh: MeshHandle, source: WeightSource) -> Iterator[None]:
    """Refuse on all stages a state that one stage refuses, after all have asked for the same weights."""
    finish = source.finish if isinstance(source, OrderedSource) else lambda: None
    with refused_together(mesh.describe, asked=isinstance(source, OrderedSource)):
        try:
            yield
        except StateError:
            finish()
            raise
        finish()


def _checked_weight(source: WeightSource, name: str, spec: ParameterSpec) -> Weight:
    advance()
    full = full_weight(source, name)
    if tuple(full.shape) != tuple(spec.shape):
        raise StateError(f"{name} has shape {tuple(full.shape)} but the plan is for {tuple(spec.shape)}")
    return full


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
                    full = whole_weight(_checked_weight(source, name, spec))
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
    with _refused_together(mesh, source), working("loading weights", len(index.loading_order())):
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
    """The parameters and buffers that this stage does not hold. A buffer is no DTensor where it is held, so that its values are
    not fetched."""
    out = {}
    for name, spec in index.specs.items():
        if name in held:
            continue
        holders = Holders(pipeline, frozenset(index.holders[name]))
        where = f"{name} is on stage {min(holders.stages)} of the pipeline, and has no values here"
        remedy = "read parallel.full_state(), and write by parallel.load_state_dict(state), which every rank calls"
        message = f"{where}: {remedy}" if spec.buffer else ""
        each = out[name] = on_another_stage(spec.shape, getattr(torch, spec.dtype), holders, message=message)
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
            full = _checked_weight(self.source, entry.name, entry.spec)
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
