"""Decoders read off a configuration are those that are read off the captured model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.plans.forced_plans import bundled_graph

from autopar.capture.models import bundled_models
from autopar.decoders.recognize import decoder_of, recognize
from autopar.model_configs import named_configs


@pytest.mark.parametrize("name", ["llama-tiny", "mixtral-tiny", "qwen3-tiny", "gpt2-tiny"])
def test_the_decoder_is_that_of_the_captured_graph(name: str) -> None:
    entry = bundled_models()[name]
    assert entry.config is not None
    found, seen = decoder_of(entry.config, entry.seq), recognize(bundled_graph(name))
    assert found is not None and seen is not None and found.layers == seen.layers
    assert replace(found.sizes, tied=seen.sizes.tied) == seen.sizes


def test_every_name_is_a_decoder() -> None:
    for name in named_configs():
        assert decoder_of(named_configs()[name], 2048) is not None, name


def test_what_is_no_known_decoder_is_none() -> None:
    assert decoder_of({"model_type": "bert", "hidden_size": 8}, 16) is None
    assert decoder_of({"model_type": "llama"}, 16) is None
