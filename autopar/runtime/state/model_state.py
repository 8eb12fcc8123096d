"""The parameters and buffers of one rank under their original names, and which of other stages there are."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..comm.agreement import gather
from ..compat.autograd import has_data
from ..compat.dtensor import local_of, replicated
from ..device.mesh import MeshHandle
from ..module import ParameterSpec, RootModule
from ..progress import working
from .gradient import name_of, own
from .gradient_buckets import GradientBuckets
from .layout import gather_full, model_shard, own_positions, zero_shard
from .loss_scale import LossScale
from .parameter_table import ParameterIndex, Table
from .stage_tensors import Holders, OnAnotherStage, PipelineStages, held_by, holders_of, on_another_stage
from .weight_source import OrderedSource, Weight, WeightInParts, WeightSource, checked_weight, refused_on_all_stages, whole_weight


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
    placed anew the expert in each slot of dimension 0 (`experts.placement`). `tied`: further names of tied tensors, each with the
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

    @cached_property
    def every_parameter(self) -> dict[str, nn.Parameter]:
        """The parameters of all stages, those of other ones without elements, and those that no program reads, in one order on
        all ranks."""
        both: dict[str, Any] = {**self.elsewhere, **self.parameters}
        return {**{name: both[name] for name, spec in self.index.specs.items() if not spec.buffer}, **self.unused}

    @cached_property
    def every_buffer(self) -> dict[str, torch.Tensor]:
        """The buffers of all stages, those of other ones without elements. On a pipeline they are DTensors over the data of
        `buffers`, which know the stages that hold them."""
        if self.pipeline is None:
            return self.buffers
        mesh = self.mesh.state_mesh
        own = {name: held_by(replicated(each, mesh), self.holders_of(name)) for name, each in self.buffers.items()}
        return {**own, **{name: each for name, each in self.elsewhere.items() if self.index.specs[name].buffer}}

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
        with torch.no_grad(), refused_on_all_stages(self.mesh, source), working("loading weights", len(self.specs)):
            for name, held in (*self.buffers.items(), *self.parameters.items()):
                if names is not None and name not in names:
                    continue
                full = checked_weight(source, name, self.specs[name])
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
