"""The named schedules: every file of `autopar.schedules.builders`, found by listing the folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import MappingProxyType

from autopar.errors import PlanError
from autopar.schedules import builders as folder
from autopar.schedules.builder import ScheduleBuilder

INTERLEAVED = "interleaved"
"""The name that people give to the builder ``1f1b`` with several model chunks a stage."""


@cache
def schedule_builders() -> Mapping[str, ScheduleBuilder]:
    """Return the builders by name, in the order of their positions."""
    modules = (import_module(f"{folder.__name__}.{each.name}") for each in iter_modules(folder.__path__))
    builders: list[ScheduleBuilder] = sorted((module.BUILDER for module in modules), key=lambda each: (each.position, each.name))
    return MappingProxyType({each.name: each for each in builders})


def schedule_names() -> tuple[str, ...]:
    """Names of schedules that have a builder; any other one comes with its actions."""
    return tuple(schedule_builders())


def builder_named(name: str, remedy: str = "give its actions", also: tuple[str, ...] = ()) -> ScheduleBuilder:
    """Return the builder of a name. PlanError where there is none, with what else one may write (`also`: names that stand for a
    builder and a number of chunks): the only place that refuses a schedule's name."""
    builder = schedule_builders().get(name)
    if builder is None:
        *most, last = (*schedule_names(), *also)
        raise PlanError(f"no schedule {name!r}: write {', '.join(most)} or {last}, or {remedy}")
    return builder
