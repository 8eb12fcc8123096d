"""Configurations of Hugging Face models by name (``model_configs.json``), in the sizes that were published. What can be built
(`capture.models.bundled_models`) has dropout off.

DeepSeek-V3: arXiv 2412.19437, section 4.2, and the published config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

Configs = Mapping[str, Mapping[str, Any]]


@lru_cache(maxsize=1)
def named_configs() -> Configs:
    """Decoders, whose sizes `decoders.recognize` reads without building a model."""
    return _groups()["decoders"]


@lru_cache(maxsize=1)
def all_configs() -> Configs:
    """Decoders, and models that are captured whatever asks for them: those for tests, and those of other kinds."""
    return {name: config for group in _groups().values() for name, config in group.items()}


def _groups() -> Mapping[str, Configs]:
    groups: Mapping[str, Configs] = json.loads((files("autopar") / "model_configs.json").read_text(encoding="utf-8"))
    return groups
