"""Batches that are objects: their tensors are inputs, and the forward gets an object of the same class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.runtime.call_keys import call_leaves


@dataclass
class Fields:
    x: Tensor
    y: Tensor
    name: str = "a"


class Attributes(dict[str, Any]):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, batch: Any) -> Tensor:
        assert isinstance(batch, (Fields, Attributes, SimpleNamespace, Plain))
        return F.cross_entropy(self.layer(batch.x), batch.y)


class Plain:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def tensors(size: int = 4) -> dict[str, Tensor]:
    return {"x": torch.randn(size, 6), "y": torch.arange(size) % 3}


@pytest.mark.parametrize("make", [Fields, SimpleNamespace, Attributes], ids=lambda each: each.__name__)
def test_a_batch_is_an_object(make: Callable[..., Any]) -> None:
    """It was refused: no tensor."""
    graph = capture(Reads(), (), {"batch": make(**tensors())})
    assert [value.name for value in graph.inputs] == ["batch_x", "batch_y"] and graph.batch_is_symbolic
    program: Any = SimpleNamespace(arguments={}, batch_dims={}, constants={}, defaults={})
    (few, size), (many, other) = (call_leaves(program, {"batch": make(**tensors(n))}, 1) for n in (4, 8))
    assert few == many and (size, other) == (4, 8)


def test_other_objects_are_refused_by_what_they_are() -> None:
    with pytest.raises(CaptureError, match="batch is a Plain, which is not taken apart: pass a dataclass"):
        capture(Reads(), (), {"batch": Plain(**tensors())})
    with pytest.raises(CaptureError, match=r"batch is a ndarray: pass torch.as_tensor of it"):
        capture(Reads(), (), {"batch": np.ones(4)})


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.int64])
def test_a_number_is_part_of_the_key(kind: Callable[[float], Any]) -> None:
    """Numbers of numpy had the key of a tensor, and another value was refused."""
    program: Any = SimpleNamespace(arguments={}, batch_dims={}, constants={"weight": repr(kind(1.0))}, defaults={})
    keys = [call_leaves(program, {**tensors(), "weight": kind(value)}, 1)[0] for value in (1.0, 2.0, 1.0)]
    assert keys[0] == keys[2] != keys[1]
