"""What the comparison of random models says of gradients that are all rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.fuzzing.models.compare import compared
from support.fuzzing.models.trial import Trial, single
from support.fuzzing.models.writer import model_of, write_model

VANISHING = 730447
"""A model whose only gradient is mathematically zero: the mean of a layer norm's outputs. Its two sides are 9.4e-16 apart."""


def trial(folder: Path) -> Trial:
    written = write_model(VANISHING)
    path = folder / "model.py"
    path.write_text(written.text)
    model = model_of(written, VANISHING, str(path))
    expected, _ = single(copy.deepcopy(model), written)
    return Trial(VANISHING, 2, "tp=2", written, expected, model)


@pytest.mark.parametrize("drawn_before", [0, 266, 338, 527])
def test_a_gradient_that_is_all_rounding_is_unsteady(drawn_before: int, tmp_path: Path) -> None:
    """Whatever was drawn before: with the numbers of 266, 338 and 527, one run with other roundings came as near as 3e-6."""
    case = trial(tmp_path)
    assert case.expected is not None
    off = {name: gradient + 9.4e-16 for name, gradient in case.expected.gradients.items()}
    torch.manual_seed(drawn_before)
    assert compared(case, [case.expected._replace(gradients=off)]) == [] and case.unsteady
