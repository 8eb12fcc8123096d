"""The form of what a model returns, and which element of it is the loss: what is called so, the only tensor, or what the user
says; never a guess."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.runtime.step.results import build_result

X, Y = torch.randn(4, 6), torch.arange(4) % 3


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))
        self.loss_fn = nn.CrossEntropyLoss()


class NanoGPT(Base):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.head(x)
        if y is None:
            return logits, None
        loss = F.cross_entropy(logits, y)
        return logits, loss


class Inline(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(x)
        return logits, self.loss_fn(logits, y)


class Older(Base):
    """As transformers wrote it."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(x)
        loss = F.cross_entropy(logits, y)
        output = (logits, x + 1)
        return ((loss,) + output) if loss is not None else output  # noqa: RUF005


@dataclass
class Fields:
    loss: Tensor | None = None
    logits: Tensor | None = None


def as_tuple(forward: Any) -> Any:
    @wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        return found.loss, found.logits

    return wrapper


class Decorated(Base):
    """As transformers writes it with ``return_dict=False``."""

    @as_tuple
    def forward(self, x: Tensor, y: Tensor) -> tuple[Any, ...] | Fields:
        logits = self.head(x)
        return Fields(F.cross_entropy(logits, y), logits)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.model(x, y)


class Clip(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.head(x), self.head(x + 1), self.scale.exp()


class Divergence(Base):
    """A variational autoencoder's: a term of the loss."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.head(x)
        return h, h.square().mean()


class Keys(Base):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.head(x)
        return {"logits": h, self.key: F.cross_entropy(h, y)}


class Alone(Base):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {"nll": F.cross_entropy(self.head(x), y), "logits": None}


def interface(model: nn.Module, *outputs: str) -> Any:
    graph = capture(model, (X, Y), outputs=outputs)
    return graph.interface, [output.path for output in graph.outputs]


@pytest.mark.parametrize("model", [NanoGPT(), Inline(), Older(), Decorated(), Wrapper(Wrapper(NanoGPT())), Keys("loss"),
                                   Keys("total_loss"), Alone()], ids=lambda model: type(model).__name__)  # fmt: skip
def test_what_is_called_a_loss_is_one(model: nn.Module) -> None:
    returns, outputs = interface(model)
    assert returns.has_loss and not outputs


@pytest.mark.parametrize(
    ("model", "paths"),
    [(Clip(), ["0", "1", "2"]), (Divergence(), ["0", "1"]), (Keys("temperature"), ["logits", "temperature"])],
    ids=lambda each: type(each).__name__,
)
def test_other_scalars_come_back(model: nn.Module, paths: list[str]) -> None:
    """A scalar that was taken for the loss left the others None."""
    returns, outputs = interface(model)
    assert not returns.has_loss and outputs == paths


def test_the_user_says_which() -> None:
    returns, outputs = interface(Divergence(), "1:loss", "0")
    assert returns.has_loss and outputs == ["0"] and returns.returns == ("tuple", (("output", "0"), ("loss",)))
    with pytest.raises(CaptureError, match="one of gradient, full, dtensor, loss"):
        interface(Divergence(), "1:lost")


class Shaped(Base):
    """A loss as scripts for DataParallel write it, alone or beside logits."""

    def __init__(self, shape: list[int], alone: bool) -> None:
        super().__init__()
        self.shape, self.alone = shape, alone

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.head(x)
        loss = F.cross_entropy(logits, y).reshape(self.shape)
        return loss if self.alone else {"logits": logits, "loss": loss}


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("shape", [[], [1], [1, 1]], ids=str)
def test_a_loss_has_its_shape(shape: list[int], alone: bool) -> None:
    returns, _ = interface(Shaped(shape, alone))
    found = build_result(returns.returns, torch.tensor(2.0), {})
    assert returns.has_loss and list((found if alone else found["loss"]).shape) == shape


class Outputs(nn.Module):
    """Returns no loss, and a field that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        return {"loss": None, "logits": self.layer(x)}


def test_a_none_beside_outputs_stays_none() -> None:
    """It was taken for the stand-in loss of a model without a loss."""
    graph = capture(Outputs(), (torch.randn(4, 4),))
    assert graph.interface is not None
    assert graph.interface.returns == ("dict", (("loss", ("constant", None)), ("logits", ("output", "logits"))))
