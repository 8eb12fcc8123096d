"""A model of which nothing trains is planned for what it is: no backward, no gradients, no state of an optimizer; and stages of a
pipeline send what they compute, rather than each computing all before it."""

from __future__ import annotations

import pytest
from support.models.zoo.output_model import classifier, examples

import autopar
from autopar.program.build import program_text


@pytest.mark.parametrize("force", ["dp=2,tp=2", "dp=4,zero=3", "pp=2,dp=2"])
def test_a_frozen_model_is_planned_forward_only(force: str) -> None:
    model = classifier()
    trained = autopar.plan(model, "local:4", examples(), force=force, time_limit_seconds=5)
    frozen = autopar.plan(model.requires_grad_(False), "local:4", examples(), force=force, time_limit_seconds=5)
    assert frozen.graph.forward_only and not trained.graph.forward_only
    said = frozen.document.predicted
    assert said.step_seconds < trained.document.predicted.step_seconds
    assert not said.memory["gradients"] and not said.memory["optimizer"]
    assert "forward_only = True" in program_text(frozen.graph, frozen.candidate)
    assert len(frozen.candidate.pipeline.repeated) == len(trained.candidate.pipeline.repeated)
