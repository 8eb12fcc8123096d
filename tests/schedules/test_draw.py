"""Schedules as lines of text."""

from __future__ import annotations

from autopar.ir.plan import Pipeline
from autopar.schedules.clock import ActionSpan, ChunkSeconds, ScheduleClock, draw
from autopar.schedules.pipeline_schedule import schedule_of


def spans(pipeline: Pipeline, micro: int, backward: float = 2.0) -> tuple[tuple[ActionSpan, ...], ...]:
    return ScheduleClock.of(schedule_of(pipeline, micro)).action_spans(
        [ChunkSeconds(1.0, backward)] * (pipeline.stages * pipeline.virtual)
    )


def test_a_short_schedule_is_drawn_to_scale() -> None:
    drawing = draw(spans(Pipeline(2), 2), 36)
    assert drawing.left_out is None
    assert drawing.lines == ("F0--F1--        B0======    B1======", "    F0--B0======F1--B1======        ")


def test_parts_and_chunks_are_told_apart() -> None:
    lines = draw(spans(Pipeline(2, 2, "zbv"), 4), 200).lines
    assert all(all(kind in line for kind in "FIWfiw") for line in lines) and all("B" not in line for line in lines)


def test_the_middle_of_a_long_schedule_is_left_out() -> None:
    many = spans(Pipeline(4), 64)
    end = max(span.end_seconds for rank in many for span in rank)
    for width in (40, 41, 100):
        drawing = draw(many, width)
        assert [len(line) for line in drawing.lines] == [width] * 4
        assert drawing.left_out is not None and 0 < drawing.left_out[0] < drawing.left_out[1] < end
        assert drawing.lines[0].startswith("F0F1F2F3") and " ~ " in drawing.lines[0] and "B63" in drawing.lines[0]
    assert draw(many, 100_000).left_out is None


def test_nothing_to_draw() -> None:
    assert draw([[], []], 20).lines == ("", "")
    assert draw(spans(Pipeline(1), 1, backward=0.0), 20).lines[0].startswith("F0")
