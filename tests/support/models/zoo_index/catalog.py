"""All models of packages that are installed from the index, with one batch each, and their factories for the command line.

``autopar verify tests/support/models/zoo_index/catalog.py:deep_fm --dtype float64`` runs one, as `file.py:factory`.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[3]))

from support.models.zoo_index.generative import generative_models  # noqa: E402
from support.models.zoo_index.images import image_models  # noqa: E402
from support.models.zoo_index.sequences import sequence_models  # noqa: E402
from support.models.zoo_index.specimen import IndexSpecimen  # noqa: E402
from support.models.zoo_index.tables_and_graphs import table_models  # noqa: E402

INSTALL = "pip install --no-deps --target FOLDER -r tests/support/models/zoo_index/requirements.txt, and FOLDER on PYTHONPATH"


def zoo_index() -> dict[str, IndexSpecimen]:
    """Every model by name."""
    return image_models() | sequence_models() | table_models() | generative_models()


def installed(name: str) -> bool:
    return importlib.util.find_spec(zoo_index()[name].module) is not None


def make(name: str, batch: int = 8, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model with values, and one batch."""
    _load_torchvision()
    torch.manual_seed(seed)
    case = zoo_index()[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with warnings.catch_warnings(action="ignore"):
            model = case.build()
    finally:
        torch.set_default_dtype(before)
    model = model.double() if dtype is torch.float64 else model  # complex parameters stay complex
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in case.batch(batch).items()}
    return model, inputs


def factories() -> dict[str, Callable[..., tuple[nn.Module, dict[str, Tensor]]]]:
    return {name: partial(make, name) for name in zoo_index()}


def _load_torchvision() -> None:
    """Torchvision of the index has compiled operators for the torch of the index, not for the one for processors: without them it
    is whole but for suppression and pooling of boxes; its import only asks that the names exist."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    names = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        names.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(names)
    importlib.import_module("torchvision")


_KEPT: list[torch.library.Library] = []


def __getattr__(name: str) -> Callable[..., tuple[nn.Module, dict[str, Tensor]]]:
    found = factories()
    if name not in found:
        raise AttributeError(f"no model {name}: there are {', '.join(found)}")
    return found[name]
