"""Forty models that were chosen before anybody looked what becomes of them: each is equal to one process, or fairly refused."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import pytest
from support.harness.rank_pool import RankPool
from support.models.unseen.catalog import specimen, unseen
from support.models.unseen.names import NAMES
from support.models.unseen.towers import towers
from support.models.unseen.vision_language import reported
from support.models.zoo.verified import verdict

_DATA = "depends on the data of a tensor"
REFUSED: Mapping[str, str] = {
    "ViltForQuestionAnswering": _DATA,  # interpolates to sizes that a mask counts
    "Idefics3ForConditionalGeneration": _DATA,  # drops images of zeros by a boolean index
    "AutoformerForPrediction": _DATA,  # shifts by delays that it computes
    "VideoMAEForPreTraining": _DATA,  # picks the visible patches by a boolean index
    "LongformerForMaskedLM": _DATA,  # asks whether any token is global
    "DetrForObjectDetection": "mend the model",  # not in float64; in float32 its matcher is as the next one's
    "YolosForObjectDetection": "numpy",
    "Qwen2VLForConditionalGeneration": _DATA,  # cuts the patches of all images where a tensor of their sizes says
    "Qwen2_5_VLForConditionalGeneration": _DATA,  # as Qwen2-VL, and into windows
    "SmolVLMForConditionalGeneration": _DATA,  # as Idefics3
    "Idefics2ForConditionalGeneration": _DATA,  # as Idefics3
    "Qwen2AudioForConditionalGeneration": _DATA,  # counts frames that a mask has
    "SpeechT5ForTextToSpeech": _DATA,  # takes the loss of frames that a boolean index picks
    "SwitchTransformersForConditionalGeneration": "torch.compiler.is_compiling()",  # makes no mask where it thinks it is compiled
}
"""Those that capture refuses, with why; the line names file, line and remedy."""
NEEDS = {"DetrForObjectDetection": "scipy", "YolosForObjectDetection": "scipy"}


def test_the_list_is_the_one_that_was_chosen() -> None:
    assert list(unseen()) != [] and set(unseen()) == set(NAMES.split())


def check(name: str, ranks: RankPool) -> None:
    if name in NEEDS and find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed: pip install --no-deps --target ../zoo {NEEDS[name]}")
    found = verdict(*specimen(name), "dp=2,tp=2", ranks)
    if name in REFUSED:
        assert found.startswith("refused: ") and REFUSED[name] in found
    else:
        assert found == "equal"


def test_one_equals_one_process(ranks: RankPool) -> None:
    check("Wav2Vec2ForCTC", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.split(), *reported(), *towers()])
def test_each(name: str, ranks: RankPool) -> None:
    check(name, ranks)
