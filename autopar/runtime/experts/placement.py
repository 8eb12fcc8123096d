"""The experts of a parallel model on the ranks of their mesh axis, in another order than the model has them.

A rank keeps its slots, and gets other experts in them: their weights, gradients and optimizer state are exchanged, and from then
on tokens go to the slot of their expert (`AxisHandle.slots` of the block's mesh). Programs and their text stay the same. `State`
puts full tensors into the model's order, and what is saved is in it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..comm.agreement import Stated, refused_together, require_agreement
from ..compat.collectives import all_to_all_rows, wait_tensor
from ..compat.dtensor import local_of
from ..compat.hooks import around_optimizer_steps
from ..device.mesh import BlockMesh
from ..errors import PlacementProblem
from ..module import BlockModule, Program
from ..state.layout import gather_zero, zero_shard
from ..state.model_state import State
from .mixtures import ExpertMixture, expert_mixtures

ExpertOrder = tuple[int, ...]
"""The expert in each slot; the slots of a rank follow each other, those of the next rank come next."""

_RESTORE = "call parallel.restore_experts() before, on all ranks"


class ExpertPlacement:
    """The orders of experts of a parallel model. `programs`: all that compute with its weights, the first one first.

    `orders`: those that are not the model's, by the first parameter of the mixture. `optimizers`: those whose state goes with
    the weights; others are refused once they have some. `copies`: those of copies of the model, which do not move with it."""

    def __init__(self, state: State, programs: Callable[[], Sequence[Program]]) -> None:
        self.state, self.programs = state, programs
        self.orders: dict[str, ExpertOrder] = {}
        self.optimizers: list[Optimizer] = []
        self._hooks: list[Any] = []
        self._watching: list[Any] | None = None
        self.copies = WeakSet[ExpertPlacement]()
        self._ready = WeakSet[Program]()  # the programs that find the experts where they are now

    def mixtures(self) -> list[ExpertMixture]:
        """The mixtures of all stages that can be placed, in the model's order: the first program takes their weights as experts
        only."""
        first, mesh, shared = self.programs()[0], self.state.mesh, self.state.index.shared
        own = list(expert_mixtures(first))
        return [
            each for each, _ in own
            if mesh.axis(each.axis).size > 1 and shared.isdisjoint(each.names) and _takes(first, own, each)
        ]  # fmt: skip

    def place(self, orders: Mapping[str, ExpertOrder]) -> None:
        """Exchange experts until the mixtures have these orders, or that of the model. All ranks call it between steps."""
        mixtures = [each for each in self.mixtures() if self.orders.get(each.names[0]) != orders.get(each.names[0])]
        self.check(mixtures)
        if orders and self._watching is None:
            self._watching = around_optimizer_steps(self, before=_before_step)
        self._ready = WeakSet()
        blocks = [pair for program in self.programs() for pair in expert_mixtures(program)] if mixtures else []
        for mixture in mixtures:
            before, after = self.order(mixture), orders.get(mixture.names[0], tuple(range(mixture.experts)))
            for name, _, tensor in self.tensors(mixture):
                with torch.no_grad():
                    self._exchange(name, local_of(tensor), mixture, before, after)
            self._set_order(mixture, after)
            for _, block in (pair for pair in blocks if pair[0].names == mixture.names):
                self._set_slots(mixture, block)

    def check(self, mixtures: Sequence[ExpertMixture]) -> None:
        """Refuse on all ranks what cannot move, before anything does."""
        mesh, held = self.state.mesh, {}
        with refused_together(mesh.describe, problem=PlacementProblem):
            for mixture in mixtures:
                held[mixture.names[0]] = [f"{name} {key}" for name, key, _ in self.tensors(mixture)]
        remedy = "call backward, and pass the same optimizers, on all ranks"
        own = {f"tensors of {first}": Stated(", ".join(keys), remedy) for first, keys in held.items() if keys}
        require_agreement(own, mesh.describe)

    def tensors(self, mixture: ExpertMixture) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The parameters of a mixture on this stage, their gradients, and the state of the optimizers."""
        for name in mixture.names if mixture.stage == self.state.mesh.pp.coordinate else ():
            parameter = self.state.parameters[name]
            yield name, "", parameter
            if parameter.grad is not None:
                yield name, "grad", parameter.grad
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, DTensor) and _placed(value) == _placed(parameter):
                        yield name, key, value
                    elif value.numel() > 1 if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple, dict)):
                        raise PlacementProblem(
                            f"{key} of {type(optimizer).__name__} is not placed like {name}, whose experts cannot move: take an "
                            "optimizer whose state is like the parameters (AdamW, SGD), or leave the experts where they are"
                        )

    def rank_bytes(self, mixture: ExpertMixture) -> int:
        """The bytes of this rank's slots: what an exchange sends at most; twice that where it gathers ZeRO's shards before."""
        shards = self.state.mesh.shard_axis.size
        return sum(local_of(each).nbytes * (2 * shards if self._divided(name) else 1) for name, _, each in self.tensors(mixture))

    def order(self, mixture: ExpertMixture) -> ExpertOrder:
        """The order that the experts of a mixture have now."""
        return self.orders.get(mixture.names[0], tuple(range(mixture.experts)))

    def _divided(self, name: str) -> bool:
        """Return whether ZeRO shards the experts of one coordinate of their axis."""
        return self.state.zero_dims[name] == 0 and self.state.mesh.shard_axis.size > 1

    def _exchange(self, name: str, local: torch.Tensor, mixture: ExpertMixture, before: ExpertOrder, after: ExpertOrder) -> None:
        """One all-to-all over the axis of the slots that change, in place. ZeRO's shards of slots are gathered for it."""
        mesh, axis = self.state.mesh, self.state.mesh.axis(mixture.axis)
        each, me = mixture.experts // axis.size, axis.coordinate
        own = gather_zero(local.to(mesh.device), each, mesh, 0) if self._divided(name) else local.to(mesh.device)
        moves = [(slot, before.index(expert)) for slot, expert in enumerate(after) if before[slot] != expert]  # to, from
        leaving = sorted((to // each, source, to) for to, source in moves if source // each == me)
        coming = sorted((source // each, source, to) for to, source in moves if to // each == me)
        send, receive = ([[rank for rank, *_ in some].count(at) for at in range(axis.size)] for some in (leaving, coming))
        sources, targets = (
            torch.tensor([slot % each for slot in slots], dtype=torch.int64, device=own.device)
            for slots in ([source for _, source, _ in leaving], [to for _, _, to in coming])
        )
        raw = all_to_all_rows(own.index_select(0, sources), receive, send, axis.group_name)
        own.index_copy_(0, targets, wait_tensor(raw))
        if own is not local:
            local.copy_(zero_shard(own, 0, mesh) if self._divided(name) else own)

    def _set_order(self, mixture: ExpertMixture, order: ExpertOrder) -> None:
        first, usual = mixture.names[0], order == tuple(range(mixture.experts))
        self.orders = {name: each for name, each in self.orders.items() if name != first} | ({} if usual else {first: order})
        held = None if usual else torch.tensor(order, device=self.state.mesh.device)
        for name in mixture.names:
            self.state.expert_orders.pop(name, None)
            if held is not None:
                self.state.expert_orders[name] = held
            parameter: Any = self.state.parameters.get(name)
            for each in () if parameter is None else (parameter, parameter.grad):
                if each is not None:
                    each.autopar_order = held

    def _set_slots(self, mixture: ExpertMixture, block: BlockModule) -> None:
        """Give a block a handle of the axis that has the slot of each expert, or the mesh's own."""
        mesh: Any = block.mesh.mesh if isinstance(block.mesh, BlockMesh) else block.mesh
        if (order := self.state.expert_orders.get(mixture.names[0])) is not None:
            slots = torch.cat([order.argsort(), order.new_tensor([len(order)])])  # a dropped copy stays one
            mesh = BlockMesh(mesh, {mixture.axis: replace(getattr(mesh, mixture.axis), slots=slots)})
        block.mesh = mesh

    def adopt(self, program: Program) -> None:
        """Let a program that is about to run find the experts. PlacementProblem where it computes with them in another way."""
        if not self.orders or program in self._ready:
            return
        own = list(expert_mixtures(program))
        for mixture in self.mixtures():
            if mixture.names[0] in self.orders and not _takes(program, own, mixture):
                raise PlacementProblem(f"this call gathers {mixture.names[0]}, whose experts were placed anew: {_RESTORE}")
        for mixture, block in own:
            self._set_slots(mixture, block)
        self._ready.add(program)

    # -- optimizers and what is in the model's order

    def know(self, optimizers: Sequence[Optimizer], placed: bool = False) -> None:
        """Take optimizers whose state goes with the weights; it is in the order of these now if it is `placed`."""
        moved = {id(self.state.parameters[name]) for name in self.state.expert_orders if name in self.state.parameters}
        for optimizer in optimizers:
            if any(optimizer is each for each in self.optimizers):
                continue
            if not placed and any(id(parameter) in moved and value for parameter, value in optimizer.state.items()):
                raise PlacementProblem(
                    f"this {type(optimizer).__name__} has state of experts from before they were placed anew: call "
                    "parallel.restore_experts(), and pass it to parallel.rebalance_experts(loads, optimizer)"
                )
            self.optimizers.append(optimizer)
            self._hooks += [
                optimizer.register_state_dict_pre_hook(self.refuse_state_dict),
                optimizer.register_load_state_dict_pre_hook(self.refuse_state_dict),
            ]

    def refuse_state_dict(self, *_: Any) -> None:
        """Refuse state dicts of DTensors, which would have the experts in the order of the ranks."""
        if self.orders:
            raise PlacementProblem(
                "the experts were placed anew, and DTensors have them in that order: use parallel.save and load, full_state and "
                f"full_optimizer_state, or {_RESTORE}"
            )

    def add_copy(self, other: ExpertPlacement) -> None:
        """Bring the experts of a copy of the model, which begins with the model's order, to where they are in this one."""
        if self.orders:
            other.place(self.orders)
        self.copies.add(other)

    def warn_of_copies(self) -> None:
        """Warn where a copy of the model has its experts elsewhere now: its tensors are no longer like those of this one."""
        if any(each.orders != self.orders for each in self.copies):
            warnings.warn(
                "a copy of this model (AveragedModel) has its experts in another order: before the next update of the copy, call "
                "rebalance_experts with the same loads and steps, or restore_experts, on it too",
                stacklevel=3,
            )

    def restore(self) -> None:
        """Bring the experts back into the model's order. All ranks call it between steps."""
        self.place({})
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.optimizers = [], []

    @contextmanager
    def in_model_order(self, optimizers: Sequence[Optimizer] = ()) -> Iterator[None]:
        """A context in which the experts are in the model's order; where it ends in an error they stay in it. All ranks enter
        it."""
        orders = self.orders
        if orders:
            self.know(optimizers)
            self.place({})
        yield
        if orders:
            self.place(orders)


def _placed(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.placements, tensor.device_mesh


def _before_step(placement: ExpertPlacement, optimizer: Optimizer, *_: Any) -> None:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if any(id(placement.state.parameters.get(name)) in own for name in placement.state.expert_orders):
        placement.know([optimizer])


def _takes(program: Program, own: Sequence[tuple[ExpertMixture, BlockModule]], mixture: ExpertMixture) -> bool:
    """Return whether the only blocks of a program that have weights of a mixture, if any, take them as its experts. `own`: the
    mixtures of the program."""
    fitting = [id(block) for other, block in own if (other.axis, other.names) == (mixture.axis, mixture.names)]
    blocks = (block for roots in program.roots() for root in roots for block in root.blocks())
    holding = (block for block in blocks if not set(mixture.names).isdisjoint(block.original_names.values()))
    return all(id(block) in fitting for block in holding)
