"""One mesh axis as this rank sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AxisHandle:
    """`coordinate` is this rank's place on the axis; `group_name` is empty where the axis has one rank."""

    name: str
    size: int = 1
    coordinate: int = 0
    group_name: str = ""
