"""Parameters that were frozen when the plan was made and require a gradient now.

The program of the plan computes no gradient for them; calls with gradients take a program that does (a variant). Here their
stored tensors begin to train: FSDP2 or the gradient buckets reduce their gradients, as those of the other parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..comm.agreement import Stated, gather, require_agreement
from ..compat.modules import train_more
from .gradient import own
from .gradient_buckets import GradientBuckets, redirect_gradients
from .materialize import State


class UnfrozenParameters:
    """`names`: those of all stages, as all ranks agreed on them last."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.names: tuple[str, ...] = ()
        self._frozen = {n: p for n, p in state.parameters.items() if not state.specs[n].trainable and p.is_floating_point()}
        self._mine: tuple[str, ...] = ()
        self._hooked: set[str] = set()

    def changed(self) -> bool:
        """Whether `requires_grad` of one of this rank's parameters has changed since the ranks agreed."""
        return self._required() != self._mine

    def agree(self, several: bool, describe: Callable[[int], str]) -> None:
        """Takes over what changed; MismatchProblem where ranks have the same parameter frozen and not. With `several` ranks all
        must call."""
        mine = self._required()
        every = set(mine)
        if several:
            remedy = "call requires_grad_ alike on every rank"
            said = {f"{n}.requires_grad": Stated(str(p.requires_grad), remedy) for n, p in self._frozen.items()}
            require_agreement(said, describe)
            every = {name for names in gather(mine) for name in names}
        for name, parameter in self._frozen.items():
            for table in self.state.tables:
                stored = table[name].stored if name in table else None
                if stored is not None and stored.requires_grad != parameter.requires_grad:
                    stored.requires_grad_(parameter.requires_grad)
        self._train([name for name in mine if name not in self._hooked])
        for root in self.state.roots if set(mine) - set(self._mine) else ():
            train_more(root)
        self.names, self._mine = tuple(sorted(every)), mine
        if self.state.stage is not None:
            self.state.stage.every_stage_trains = self.state.index.every_stage_trains(self.state.mesh.pp.size, every)

    def _required(self) -> tuple[str, ...]:
        return tuple(name for name, parameter in self._frozen.items() if parameter.requires_grad)

    def _train(self, names: Sequence[str]) -> None:
        """The hooks that `materialize` gives to parameters that train."""
        state, new = self.state, dict[tuple[GradientBuckets, torch.dtype], dict[nn.Parameter, nn.Parameter]]()
        for name in names:
            self._hooked.add(name)
            canonical = state.parameters[name]
            own(canonical, state.stage, name)
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
        """Those of the only model chunk that has the parameter, or of all of them."""
        return self.state.chunk_buckets[holding[0]] if self.state.chunk_buckets and len(holding) == 1 else self.state.buckets
