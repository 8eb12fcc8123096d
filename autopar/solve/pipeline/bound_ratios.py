"""What larger micro-batches of a stage mesh showed: by how much the steps of its pipelines are above their lower bounds."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.mesh import DATA_AXIS
from autopar.solve.space.grid import GridPoint
from autopar.solve.space.pipeline_grid import ScheduleOption


def bubble_factor(point: GridPoint, option: ScheduleOption) -> float:
    """The step with its bubble over that of the fullest stage."""
    return 1 + option.bubble_passes * (point.stages - 1) / point.micro_batches


class BoundRatios:
    """Estimates without memory over bounds. A bound is of the largest micro-batch: smaller ones take as much longer at least, by
    the example."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._known: dict[object, list[tuple[int, ScheduleOption, float]]] = {}

    def examples(self, point: GridPoint) -> int:
        """Of one micro-batch on one data rank."""
        return self._batch // point.micro_batches // point.mesh.size_of(DATA_AXIS)

    def least(self, point: GridPoint, option: ScheduleOption) -> float:
        """What larger micro-batches showed of this schedule, or of any."""
        known = [each for each in self._known.get(self._key(point), ()) if each[0] >= self.examples(point)]
        same = [ratio for _, of, ratio in known if (of.schedule, of.virtual) == (option.schedule, option.virtual)]
        return max(1.0, max(same, default=0.0) or min((ratio for *_, ratio in known), default=1.0))

    def learn(self, point: GridPoint, ratios: Mapping[ScheduleOption, float]) -> None:
        """The schedules of `point` take so many times what its bound with their bubble says."""
        self._known.setdefault(self._key(point), []).extend((self.examples(point), *each) for each in ratios.items())

    @staticmethod
    def _key(point: GridPoint) -> object:
        return point.mesh.axes[1:], point.mesh.size_of(DATA_AXIS) > 1
