"""Runs trials on ranks, and compares each with one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from support.fuzzing.models.on_ranks import Steps, run_cases
from support.fuzzing.models.trial import Trial, single
from support.harness.comparison import different_numbers, different_tensors
from support.harness.rank_pool import RankError, RankPool

TOLERANCE, LOW_TOLERANCE = 1e-9, 3e-5
WIGGLE, LOW_WIGGLE = 1e-13, 3e-8
"""Roundings of float64, and of the float32 that some models cast to: a smaller one would vanish in the cast."""

_MOVES = 4
"""How often one process is run with numbers that are off by a rounding: one run may be near the first by chance."""


def run_trials(trials: Sequence[Trial], ranks: RankPool, timeout: float = 120.0) -> None:
    """Runs what was prepared on ranks, and compares. Cases that make their ranks fail together are found one by one."""
    for world in sorted({trial.world for trial in trials}):
        mine = [trial for trial in trials if trial.world == world and trial.case is not None]
        if not mine:
            continue
        try:
            _judge(mine, ranks.run(run_cases, [trial.case for trial in mine], world=world, timeout=timeout))
        except RankError:
            for trial in mine:
                try:
                    _judge([trial], ranks.run(run_cases, [trial.case], world=world, timeout=30.0))
                except RankError as error:
                    trial.wrong = str(error)


def _judge(trials: Sequence[Trial], answers: Sequence[Sequence[Steps | str]]) -> None:
    for number, trial in enumerate(trials):
        found = [answer[number] for answer in answers]
        said = [each for each in found if isinstance(each, str)]
        if said:
            refusals = [each for each in said if "\n" not in each]
            if len(refusals) == len(found):
                trial.refused = refusals[0]
            else:
                trial.wrong = max(said, key=len)
            continue
        trial.wrong = "\n".join(compared(trial, [each for each in found if isinstance(each, Steps)]))


def compared(trial: Trial, found: Sequence[Steps]) -> list[str]:
    """What differs from one process; nothing where one process with inputs that are off by a rounding differs as much."""
    written, expected = trial.written, trial.expected
    assert written is not None and expected is not None and trial.model is not None
    tolerance = LOW_TOLERANCE if written.low else TOLERANCE
    wrong = [text for each in found for text in different_numbers("loss", each.losses, expected.losses, tolerance)]
    wrong += step_differences(found[0], expected, tolerance)
    if not wrong:
        return []
    trial.unsteady = any(_departs_by_a_rounding(trial, expected, tolerance, number) for number in range(_MOVES))
    return [] if trial.unsteady else wrong


def _departs_by_a_rounding(trial: Trial, expected: Steps, tolerance: float, number: int) -> bool:
    """Whether one process departs from itself where its numbers are off by a rounding; the same ones for every call."""
    written, moved = trial.written, copy.deepcopy(trial.model)
    assert written is not None and moved is not None
    wiggle, draw = LOW_WIGGLE if written.low else WIGGLE, torch.Generator().manual_seed(number)

    def off(tensor: Tensor) -> Tensor:
        return 1 + wiggle * torch.randn(tensor.shape, generator=draw, dtype=tensor.dtype)

    with torch.no_grad():
        for tensor in moved.parameters():
            tensor.mul_(off(tensor))
    inputs = {name: x * off(x) if x.is_floating_point() else x for name, x in written.inputs.items()}
    other, _ = single(moved, replace(written, inputs=inputs))
    wrong = step_differences(other, expected, tolerance / 10)
    return bool(wrong or different_numbers("loss", other.losses, expected.losses, tolerance / 10))


def step_differences(found: Steps, expected: Steps, tolerance: float) -> list[str]:
    """Gradients, state and results; a gradient that one side lacks is zero. `noise`: a gradient that vanishes is all rounding,
    and so is a bias that began at zero and was updated by it."""
    names = found.gradients.keys() | expected.gradients.keys()
    whole = {name: found.gradients.get(name, expected.gradients.get(name)) for name in names}
    gradients = [
        {name: each.gradients.get(name, torch.zeros_like(whole[name])) for name in names}  # type: ignore[arg-type]
        for each in (found, expected)
    ]
    wrong = different_tensors("gradient", *gradients, tolerance, noise=1e-3)
    both = found.state.keys() & expected.state.keys()
    wrong += different_tensors(
        "state",
        {name: found.state[name] for name in both},
        {name: expected.state[name] for name in both},
        tolerance,
        noise=1e-3,
    )
    there = found.returned.keys() & expected.returned.keys()
    wrong += different_tensors(
        "result", {name: found.returned[name] for name in there}, {name: expected.returned[name] for name in there}, tolerance
    )
    if not there:
        wrong.append(f"results {sorted(found.returned)} instead of {sorted(expected.returned)}")
    return wrong
