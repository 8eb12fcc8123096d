"""Models by name, by config.json and by factory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.capture.models import bundled_models, load_model
from autopar.errors import CaptureError

ISSUE = {"gpt2", "gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b", "bert-large", "vit-huge", "mlp", "convnet"}


def test_names() -> None:
    assert set(bundled_models()) >= ISSUE


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny", "qwen3-tiny", "bert-tiny", "vit-tiny", "mlp", "convnet"])
def test_a_loss_comes_out(name: str) -> None:
    loaded = load_model(name, 2, device="cpu")
    assert isinstance(loaded.example_inputs, dict)
    output = loaded.model(**loaded.example_inputs)
    assert (output if isinstance(output, torch.Tensor) else output.loss).dim() == 0
    assert all(parameter.is_meta for parameter in load_model(name, 2).model.parameters())


def test_sizes() -> None:
    count = sum(parameter.numel() for parameter in load_model("llama3-8b", 1).model.parameters())
    assert count == 8_030_261_248


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    path.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    loaded = load_model(str(path), 3, dtype="bfloat16")
    assert isinstance(loaded.example_inputs, dict) and loaded.example_inputs["input_ids"].shape == (3, 16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}


def test_factory(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "def build(batch=2):\n    return torch.nn.Linear(4, 4), (torch.zeros(batch, 4),)\n"
        "def alone():\n    return torch.nn.Linear(4, 4)\n"
        "def broken():\n    raise ValueError('no')\n"
    )
    loaded = load_model(f"{path}:build", 5)
    assert isinstance(loaded.example_inputs, tuple) and loaded.example_inputs[0].shape == (5, 4)
    for name, words in (("alone", "example inputs"), ("broken", "ValueError: no"), ("missing", "no function")):
        with pytest.raises(CaptureError, match=words):
            load_model(f"{path}:{name}")


def test_a_factory_that_reads_numbers_of_tensors(tmp_path: Path) -> None:
    """As rates of stochastic depth are made; the meta device has none."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n"
        "    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]\n"
        "    return nn.Sequential(*(nn.Dropout(rate) for rate in rates)), (torch.ones(4),)\n"
    )
    with pytest.warns(UserWarning, match="weights are made on the CPU"):
        loaded = load_model(f"{tmp_path}/mine.py:make", None, None, device="meta")
    assert [round(layer.p, 2) for layer in loaded.model] == [0.0, 0.05, 0.1]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("source", "words"), [("lama3", "llama3-8b"), ("none.json", "cannot read"), ("none.py:f", "no file"), ("none.py", "factory")]
)
def test_unknown(source: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        load_model(source)
    assert "\n" not in str(caught.value)


def test_too_long() -> None:
    with pytest.raises(CaptureError, match="at most 64"):
        load_model("gpt2-tiny", 2, 65)
