"""Lends the weights of one program to another program of the same model, which computes with them and trains them.

Replicated parameters and buffers are simply registered twice. A parameter that FSDP2 shards belongs to a block of the first
program: the other program's block runs *inside* that block, so that FSDP2's hooks gather the weights before it and reduce the
gradients after its backward. The whole program runs inside the first program for the same reason.

Parameters that were frozen when the plan was made may require a gradient in a later call, whose program computes one: here their
stored tensors begin to train, and FSDP2 or the gradient buckets reduce their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.agreement import Stated, gather, require_agreement
from ..compat.modules import train_more
from ..errors import StateError
from ..module import BlockModule, ParameterSpec, Program, RootModule
from .gradient import own
from .gradient_buckets import GradientBuckets, redirect_gradients
from .model_state import State
from .parameter_table import ParameterEntry, Table
from .stage_tensors import holders_of


class _Loan(NamedTuple):
    """A gathered parameter: the borrower's attribute, and the module and attribute that FSDP2 fills."""

    attribute: str
    owner: nn.Module
    own: str


def run_inside(owner: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in place of the owner's forward, between the owner's hooks."""
    before = owner.__dict__.get("forward")
    owner.__dict__["forward"] = function
    try:
        return owner(*args, **kwargs)
    finally:
        if before is None:
            del owner.__dict__["forward"]
        else:
            owner.__dict__["forward"] = before


def lend_state(program: Program, owner: Program, state: State) -> None:
    """Fill `program`, whose blocks are on meta, with the weights of `owner`, for good. StateError where it stores a parameter
    in another way or on another stage."""
    program.__dict__["state_program"] = owner
    holders = {root.position: (root, table) for root, table in zip(state.roots, state.tables, strict=True)}
    for root in program.roots()[program.mesh.pp.coordinate]:
        holder, table = holders.get(root.position, (None, {}))
        for block in root.blocks():
            _lend_block(block, holder, table, state)
        if holder is not None:
            root.forward = partial(run_inside, holder, root.forward)
        if holder is not None and hasattr(root, "weight_grads"):
            _share_weight_gradients(root, holder)


def _lend_block(block: BlockModule, holder: RootModule | None, table: Table, state: State) -> None:
    loans: list[_Loan] = []
    for spec in block.specs:
        name = block.original_names[spec.path]
        if spec.buffer:
            if name not in state.buffers:
                raise StateError(f"it reads the buffer {name}, which the first program does not")
            block.register_buffer(spec.attribute, state.buffers[name], persistent=spec.persistent)
            continue
        entry = table.get(name) or _replicated(name, state)
        _check(name, spec, entry)
        if entry.zero_dim is None:
            block.register_parameter(spec.attribute, entry.stored)
        else:
            del block._parameters[spec.attribute]
            assert holder is not None, "its table has the entry"
            loans.append(_loan(spec, entry, holder))
    if loans:
        block.forward = partial(_borrowing, block, tuple(loans), block.forward)


def _replicated(name: str, state: State) -> ParameterEntry:
    """A parameter of another model chunk of this stage, which only a replicated one can be."""
    for table in state.tables:
        if name in table and table[name].zero_dim is None:
            return table[name]
    raise StateError(f"it reads {name} where the first program does not")


def _check(name: str, spec: ParameterSpec, entry: ParameterEntry) -> None:
    own, stored = (
        (spec.shape, dict(spec.placements), spec.dtype),
        (entry.spec.shape, dict(entry.spec.placements), entry.spec.dtype),
    )
    if own != stored:
        raise StateError(f"it stores {name} as {own}, the first program as {stored}")


def _loan(spec: ParameterSpec, entry: ParameterEntry, holder: RootModule) -> _Loan:
    owner = entry.blocks[0]
    attribute = next(each.attribute for each in owner.specs if owner.original_names[each.path] == entry.name)
    if len(entry.blocks) > 1:
        own = next(own for own, block, theirs in holder.shared_parameters if block is owner and theirs == attribute)
        return _Loan(spec.attribute, holder, own)
    return _Loan(spec.attribute, owner, attribute)


def _borrowing(block: BlockModule, loans: tuple[_Loan, ...], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a block inside the modules that gather its parameters."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        for loan in loans:
            block.__dict__[loan.attribute] = getattr(loan.owner, loan.own)
        return forward(*args, **kwargs)

    inner: Callable[..., Any] = compute
    for owner in dict.fromkeys(loan.owner for loan in loans if isinstance(loan.owner, BlockModule)):
        inner = partial(run_inside, owner, inner)
    return inner(*args, **kwargs)


def _share_weight_gradients(root: RootModule, holder: RootModule) -> None:
    """Weight gradients of split backwards wait in the first program's queue, under its blocks."""
    root.weight_grads = holder.weight_grads  # type: ignore[assignment, unused-ignore]
    owners: Mapping[str, BlockModule] = {name: block for block in holder.blocks() for name in block.original_names.values()}
    for block in root.blocks():
        owner = next((owners[name] for name in block.original_names.values() if name in owners), None)
        if owner is not None:
            block.split_backward = owner.split_backward


class UnfrozenParameters:
    """The parameters that train now and were frozen when the plan was made. `names`: those of all stages, as all ranks agreed on
    them last."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.names: tuple[str, ...] = ()
        self._frozen = {n: p for n, p in state.parameters.items() if not state.specs[n].trainable and p.is_floating_point()}
        self._own: tuple[str, ...] = ()
        self._hooked: set[str] = set()

    def changed(self) -> bool:
        """Return whether `requires_grad` of one of this rank's parameters has changed since the ranks agreed."""
        return self._required() != self._own

    def agree(self, several: bool, describe: Callable[[int], str]) -> None:
        """Take over what changed; MismatchProblem where ranks have the same parameter frozen and not. With `several` ranks all
        must call."""
        own = self._required()
        every = set(own)
        if several:
            remedy = "call requires_grad_ alike on every rank"
            stated = {f"{n}.requires_grad": Stated(str(p.requires_grad), remedy) for n, p in self._frozen.items()}
            require_agreement(stated, describe)
            every = {name for names in gather(own) for name in names}
        for name, parameter in self._frozen.items():
            for table in self.state.tables:
                stored = table[name].stored if name in table else None
                if stored is not None and stored.requires_grad != parameter.requires_grad:
                    stored.requires_grad_(parameter.requires_grad)
        self._train([name for name in own if name not in self._hooked])
        for root in self.state.roots if set(own) - set(self._own) else ():
            train_more(root)
        self.names, self._own = tuple(sorted(every)), own

    def _required(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self._frozen.items() if parameter.requires_grad)

    def _train(self, names: Sequence[str]) -> None:
        """The hooks that `materialize` gives to parameters that train."""
        state, new = self.state, dict[tuple[GradientBuckets, torch.dtype], dict[nn.Parameter, nn.Parameter]]()
        for name in names:
            self._hooked.add(name)
            canonical = state.parameters[name]
            own(canonical, holders_of(canonical), name)
            holding = [index for index, table in enumerate(state.tables) if name in table]
            for index in holding:
                entry = state.tables[index][name]
                assert entry.stored is not None, "materialize filled it"
                if entry.zero_dim is None:
                    new.setdefault((self._buckets(holding), canonical.dtype), {})[entry.stored] = canonical
                else:
                    redirect_gradients(entry.stored, canonical)
        for (buckets, _), members in new.items():
            buckets.add(members)

    def _buckets(self, holding: list[int]) -> GradientBuckets:
        """Return the buckets of the only model chunk that has the parameter, or of all of them."""
        return self.state.chunk_buckets[holding[0]] if self.state.chunk_buckets and len(holding) == 1 else self.state.buckets
