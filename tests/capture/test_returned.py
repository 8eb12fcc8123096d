"""The form of what a model returns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture


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
