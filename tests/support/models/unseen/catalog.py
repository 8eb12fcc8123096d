"""The models of `names`, small and with random weights, with one batch each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.models.model_families import Batch, Family
from support.models.unseen.sequences import sounds, time_series
from support.models.unseen.texts import texts
from support.models.unseen.towers import towers
from support.models.unseen.vision import dense_vision, image_classes
from support.models.unseen.vision_language import reported, vision_language


def unseen() -> dict[str, Family]:
    """Every model by the name of its class."""
    found = [*vision_language(), *sounds(), *time_series(), *dense_vision(), *image_classes(), *texts()]
    return {family.model: family for family in found}


def doubled(batch: Any) -> Any:
    """A batch in float64."""
    if isinstance(batch, dict):
        return {name: doubled(value) for name, value in batch.items()}
    if isinstance(batch, list):
        return [doubled(value) for value in batch]
    return batch.double() if isinstance(batch, Tensor) and batch.is_floating_point() else batch


def specimen(name: str) -> tuple[nn.Module, Batch]:
    """The model in float64, and one batch of 4 examples."""
    torch.manual_seed(0)
    family = (unseen() | reported() | towers())[name]
    model = family.build().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the others have no kernel for float64 on a CPU
    return model, doubled(family.batch(4))
