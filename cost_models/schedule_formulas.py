"""Seconds of a step and its schedule, as formulas: what overlaps, what micro-batches and pipeline stages add."""

from __future__ import annotations

from autopar.cost_models.formulas import Formula

_MEGATRON = "Narayanan et al., arXiv 2104.04473, section 2.2"
_STAGES = (("p", "pipeline stages"), ("v", "chunks of a stage"), ("m", "micro-batches"))


def formulas() -> tuple[Formula, ...]:
    """Named after what they price."""
    return (
        Formula(
            "step.call",
            "Max(main + c*behind, behind + shared)",
            (
                ("main", "seconds of the main stream: computing and collectives that it waits for"),
                ("behind", "seconds of the transfers behind it: the next call's gather, the last one's reduction"),
                ("shared", "the part of main on the links of these transfers"),
                ("c", "share of its speed that the main stream loses meanwhile"),
            ),
            "two streams; a transfer stands still while the main stream uses its link",
        ),
        Formula(
            "step.seconds",
            "first + (m - 1)*(backward + forward) + last + tail + optimizer",
            (
                ("first", "seconds of the first forward, with the first gather"),
                ("forward", "seconds of each later forward"),
                ("backward", "seconds of each backward but the last"),
                ("last", "seconds of the last backward"),
                ("tail", "seconds of the last reduction"),
                ("optimizer", "seconds of the optimizer"),
                ("m", "micro-batches"),
            ),
            "one stage",
        ),
        Formula(
            "step.accumulate",
            "size*(2 + read)/(parts*rate)",
            (
                ("size", "bytes of the gradients in the master's dtype"),
                ("read", "bytes of a new gradient's element beside those of the master's"),
                ("parts", "ranks over which gradients are cut while they add up (ZeRO-2 and 3)"),
                ("rate", "bytes per second of memory"),
            ),
            "a new gradient is read, the sum is read and written",
        ),
        Formula("pipeline.bubble", "(p - 1)/(v*m)", _STAGES, _MEGATRON, "of the ideal time"),
        Formula("pipeline.ahead", "p - s - 1", (*_STAGES, ("s", "the stage, from 0")), _MEGATRON, "forwards"),
        Formula(
            "pipeline.ahead.interleaved",
            "2*(p - s - 1) + (v - 1)*p",
            (*_STAGES, ("s", "the stage, from 0")),
            f"{_MEGATRON}.2",
            "forwards",
        ),
    )
