"""DualPipeV: DeepSeek-AI, arXiv 2412.19437 and github.com/deepseek-ai/DualPipe, in the order of torch's `ScheduleDualPipeV`.

There a forward and a backward that are next to each other run at once; here one after the other.
"""

from __future__ import annotations

from autopar.ir.schedule import BACKWARD, INPUT, Action
from autopar.schedules.builder import ScheduleBuilder, VShapedStage, v_bubble


def dual_pipe_v(stages: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """Return the actions of a stage, for at least ``2 p`` micro-batches."""
    out, following = VShapedStage(stages, rank), stages - rank - 1
    out.add(*["F0"] * (2 * following), *["F0", "F1"] * (rank + 1))
    for _ in range(following):
        out.add("I1")
        out.add_weight_gradients()
        out.add("F1")
    out.add(*["F0", "B1", "F1", "B0"] * (micro_batches - 2 * stages + rank + 1), *["B1", "F1", "B0"] * following)
    for place in range(2 * (rank + 1)):  # the second half of them with the split backward
        out.add(f"{INPUT if place > rank else BACKWARD}{1 - place % 2}")
    for _ in range(following):
        out.add_weight_gradients()
        out.add("I0")
    for _ in range(rank + 1):
        out.add_weight_gradients()
    return tuple(out.actions)


BUILDER = ScheduleBuilder(
    name="dualpipev", position=5, actions=dual_pipe_v, v_shaped=True, splits_backward=True, micro_batches_per_stage=2,
    bubble_passes=v_bubble,
)  # fmt: skip
