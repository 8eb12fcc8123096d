"""The groups of an optimizer over a parallel model as the same script makes them of the plain model: in the order in which it
gives the parameters, with those of all stages of a pipeline and those that no forward uses."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import StateError


class ParameterKind(NamedTuple):
    """The properties of a parameter that scripts divide by, beside its name."""

    dims: int
    trains: bool


_FEATURES: tuple[Callable[[str, ParameterKind], Any], ...] = (
    lambda name, kind: None,
    lambda name, kind: kind.trains,
    lambda name, kind: kind.dims > 1,
    lambda name, kind: (kind.trains, kind.dims > 1),
    lambda name, kind: name.rpartition(".")[2],
    lambda name, kind: name.partition(".")[0],
    lambda name, kind: name.rpartition(".")[0],
)
"""What a script may divide parameters by: nothing, whether they train, matrices or not, the last part of the name, modules."""


def names_by_group(parameters: Mapping[str, torch.Tensor], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of this rank's parameters in each group. StateError where the optimizer has one of another model. The one
    without elements of a stage without parameters has no name."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in names and parameter.numel() for parameter in group["params"]):
            raise StateError(
                "the optimizer has a parameter that is not of this model: make it from the parallel model's parameters()"
            )
        groups.append([names[id(parameter)] for parameter in group["params"] if id(parameter) in names])
    return groups


def joined_groups(stages: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Return the names in each group of the optimizers of all stages, once each. StateError where their numbers differ."""
    if len({len(each) for each in stages}) > 1:
        raise StateError("the optimizers of the stages have different numbers of groups: give all of them the same groups")
    return [list(dict.fromkeys(name for names in same for name in names)) for same in zip(*stages, strict=True)]


def ordered_groups(stages: Sequence[Sequence[Sequence[str]]], order: Sequence[str]) -> list[list[str]]:
    """Return `joined_groups` in the order of the script. A stage of a pipeline knows that of its own parameters: StateError where
    it is not the model's `order`, nor one from the last modules to the first."""
    joined = joined_groups(stages)
    return [_ordered(number, names, [each[number] for each in stages], order) for number, names in enumerate(joined)]


def _ordered(number: int, names: Sequence[str], stages: Sequence[Sequence[str]], order: Sequence[str]) -> list[str]:
    if sum(map(bool, stages)) < 2:
        return list(names)
    own = [name for name in order if name in set(names)]
    if all(_agrees(own, each) for each in stages):
        return own
    backwards = (own[::-1], *(_backwards(own, depth) for depth in range(1, max(name.count(".") for name in own) + 1)))
    possible = {tuple(each) for each in backwards if all(_agrees(each, stage) for stage in stages)}
    if len(possible) != 1:
        raise StateError(
            f"group {number} of the optimizer has its parameters in an order of its own, of which a stage of a pipeline sees a "
            "part: give them in the model's order, or call parallel.save and parallel.load, which go by names"
        )
    return list(possible.pop())


def _agrees(every: Sequence[str], some: Sequence[str]) -> bool:
    held = set(some)
    return [name for name in every if name in held] == list(some)


def _backwards(names: Sequence[str], depth: int) -> list[str]:
    """Return the names from the last module of a depth to the first, each module in its order."""
    modules = [list(each) for _, each in groupby(names, lambda name: name.split(".")[:-1][:depth])]
    return [name for each in reversed(modules) for name in each]


def with_unused(
    groups: Sequence[Sequence[str]], kinds: Mapping[str, ParameterKind], unused: Sequence[str]
) -> tuple[list[list[str]], str]:
    """Return the groups with the parameters that no forward uses where the script puts them, as far as what it divides all others
    by says it, and the name of one of which nothing does. `kinds`: of all parameters, in the model's order."""
    places: dict[str, int | None] = {name: number for number, group in enumerate(groups) for name in group}
    used = [name for name in kinds if name not in unused]
    order = {name: number for number, name in enumerate(kinds)}
    rules = []
    for feature in _FEATURES:
        found: dict[Any, set[int | None]] = {}
        for name in used:
            found.setdefault(feature(name, kinds[name]), set()).add(places.get(name))
        if all(len(each) == 1 for each in found.values()):
            rules.append((feature, found))
    out, unknown = [list(group) for group in groups], ""
    for name in unused:
        possible = {place for feature, found in rules for place in found.get(feature(name, kinds[name]), ())}
        place = possible.pop() if len(possible) == 1 else None
        if place is not None and (positions := [order[each] for each in out[place]]) == sorted(positions):
            out[place].insert(bisect(positions, order[name]), name)
        elif place is not None or possible or all(each in places for each in used):
            unknown = unknown or name
    return out, unknown
