"""Cluster files and names, ``--force`` texts, and Hugging Face configurations, changed at random."""

from __future__ import annotations

import json
import random
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.fuzzing.attempts import attempt, check_seeds, examples
from support.plans.mutations import ODD, mutated, places

from autopar.capture.models import bundled_models, load_model
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import preset_path, presets
from autopar.explain.what_if import parse_what_if
from autopar.solve.space.force import parse_force

POOL = (*ODD, 10**400, -(10**400), float("inf"), float("nan"), date(2020, 1, 1), "dgx-h100:2", "local:²", {"cluster": "x"})
NAMES = (
    "local", "dgx-h100", "dgx-a100", "+", ":", "1", "2", "²", "٣", "-1", "9" * 20, "", " ", ".yaml", "/", "\n", "é", "1e9",
    "\x00",
)  # fmt: skip
PIECES = (
    "{", "}", "[", "]", ":", ",", "&a ", "*a ", "!!int ", "!!float ", "!!python/object:os.system ", "<<: ", "2001-99-99",
    "\t", "{" * 3000, "[" * 3000, "- " * 2000, "? ", "9" * 5000, "\x00", "%", "@", "`", "'", '"', "#", "|", ">", "²",
)  # fmt: skip
WORDS = (
    "tp", "dp", "pp", "ep", "tp2", "zero", "zero_group", "micro", "virtual", "schedule", "recompute", "sequence_parallel",
    "=", ",", "micro_batches", "weight_versions", "nodes", "memory", "batch", "1", "2", "3", "0", "-1", "²", "٣", "9" * 30,
    "9" * 9, "1f1b", "gpipe", "none", "full", "synthesized", " ", "\n", "\x00", "é", "==", "dp=2", "tp=2,zero=3", "schedule=",
    "1e300", "nan",
)  # fmt: skip


@cache
def presets_as_data() -> tuple[Any, ...]:
    heterogeneous = {"name": "x", "groups": [{"cluster": "dgx-h100:2"}, {"cluster": "dgx-a100:2"}]}
    return (*(yaml.safe_load(preset_path(name).read_text()) for name in presets()), heterogeneous)


def changed(document: Any, draw: random.Random, pool: tuple[Any, ...] = POOL) -> Any:
    for _ in range(draw.choice((1, 1, 2, 3))):
        try:
            document = mutated(document, draw.choice(list(places(document))), draw, pool)
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
    return document


def check_cluster(draw: random.Random, folder: Path) -> None:
    path, form = folder / "cluster.yaml", draw.random()
    if form < 0.3:
        name = "".join(draw.choice(NAMES) for _ in range(draw.randrange(1, 6)))
        attempt(lambda: Cluster.parse(name))
        return
    text = preset_path(draw.choice(presets())).read_text()
    if form < 0.5:
        for _ in range(3):
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice(PIECES) + text[at + draw.randrange(3) :]
    else:
        try:
            text = yaml.safe_dump(changed(draw.choice(presets_as_data()), draw))
        except (yaml.YAMLError, ValueError, TypeError):
            return  # no text that a file could have
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    attempt(lambda: Cluster.parse(str(path)).to_dict())


def check_force(draw: random.Random) -> None:
    text = "".join(draw.choice(WORDS) for _ in range(draw.randrange(1, 10)))
    attempt(lambda: parse_force(text))
    attempt(lambda: parse_what_if(text))


KINDS = (
    "gpt2", "llama", "bert", "vit", "mixtral", "opt", "falcon", "bloom", "gemma2", "phi3", "t5", "mamba", "resnet", "swin",
    "nothing", 5,
)  # fmt: skip
KEYS = (
    "hidden_act", "rope_scaling", "rope_parameters", "attention_dropout", "tie_word_embeddings", "quantization_config",
    "auto_map", "num_labels", "id2label", "attn_implementation", "_attn_implementation", "layer_types", "sliding_window",
    "pad_token_id", "head_dim", "pruned_heads", "is_decoder", "problem_type", "torch_dtype", "dtype", "architectures",
    "use_cache",
)  # fmt: skip


def check_configuration(draw: random.Random, folder: Path) -> None:
    tiny = [dict(each.config) for name, each in bundled_models().items() if each.config and "tiny" in name]
    document: dict[str, Any] = draw.choice(tiny)
    if draw.random() < 0.15:
        document = {**document, "model_type": draw.choice(KINDS)}
    if draw.random() < 0.3:
        document = {**document, draw.choice(KEYS): draw.choice((*ODD, "silu", "flash_attention_2", "user/kernels", "bfloat16"))}
    path = folder / "config.json"
    path.write_text(json.dumps(changed(document, draw, ODD)))
    attempt(lambda: load_model(str(path), 2, None), most_seconds=5)  # the first model of a type imports its module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@examples(60)
@given(draw=st.randoms(use_true_random=False))
def test_clusters(folder: Path, draw: random.Random) -> None:
    check_cluster(draw, folder)


@examples(200)
@given(draw=st.randoms(use_true_random=False))
def test_force_texts(draw: random.Random) -> None:
    check_force(draw)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clusters", "force", "configurations"])
def test_a_thousand_of_each(folder: Path, kind: str) -> None:
    of_files = check_cluster if kind == "clusters" else check_configuration
    check_seeds(1000, check_force if kind == "force" else lambda draw: of_files(draw, folder))


def test_configurations(folder: Path) -> None:
    for number in range(40):
        check_configuration(random.Random(10_000 + number), folder)


def test_a_configuration_names_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers fetches attention kernels that a configuration names."""
    import transformers

    given_: dict[str, Any] = {}

    def for_model(**given: Any) -> Any:
        given_.update(given)
        raise ValueError("seen")

    monkeypatch.setattr(transformers.AutoConfig, "for_model", for_model)
    odd = {
        "_attn_implementation": "user/kernels",
        "attn_implementation": "user/kernels",
        "auto_map": {"AutoConfig": "user/code--x.y"},
    }
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "text_config": odd, **odd}))
    with pytest.raises(Exception, match="seen"):
        load_model(str(path))
    assert given_ == {"model_type": "llama", "hidden_size": 64, "text_config": {}}
