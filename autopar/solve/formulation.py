"""The variables of one ILP by name, and the model that they are columns of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autopar.solve.boundary import Kind, Slot
from autopar.solve.linear import LinearModel, Terms
from autopar.solve.problem import Problem
from autopar.solve.state import StateTerms

if TYPE_CHECKING:
    from autopar.solve.replay import Storages


@dataclass(slots=True)
class Formulation:
    """The model and what its variables mean. Objective x `second_unit` are seconds."""

    problem: Problem
    second_unit: float
    byte_unit: float
    model: LinearModel = field(default_factory=LinearModel)
    x: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """x[block, node][choice]"""
    w: dict[int, list[int]] = field(default_factory=dict)
    """w[class][placement]"""
    y: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """y[block, value][step]"""
    z: dict[str, dict[int, int]] = field(default_factory=dict)
    """z[block][zero]; z[""] is the group of parameters that several calls share"""
    states: dict[Kind | None, StateTerms] = field(default_factory=dict)
    forward: dict[str, tuple[int, Terms]] = field(default_factory=dict)
    backward: dict[str, tuple[int, Terms]] = field(default_factory=dict)
    penalties: dict[int, float] = field(default_factory=dict)
    storages: dict[str, Storages] = field(default_factory=dict)
    """per block what is kept, made again or moved to the host (see `replay`)"""
    groups: dict[frozenset[Slot], int] = field(default_factory=dict)
    """bytes of a tensor between calls, by the slots that may keep it (see `memory`)"""
