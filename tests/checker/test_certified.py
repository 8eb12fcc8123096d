"""Programs of models under all kinds of plans are proven: what `support/judges/certified_table.py` counts for docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.judges.certified_table import CERTIFIED, DOCUMENT, NO_PROGRAM, PLANS, TITLES, judge, records, sets, table
from torch import Tensor, nn

from autopar.capture import capture


@pytest.mark.parametrize(
    ("group", "name", "kind"),
    [("small", "mlp", "free choice"), ("small", "mlp", "1f1b"), ("small", "gpt2", "recompute some"),
     ("written", "prototypes", "ZeRO 3, micro-batches"), ("written", "spatial_transformer", "drawn")],
)  # fmt: skip
def test_some(group: str, name: str, kind: str) -> None:
    model, inputs = sets()[group][1](name)
    assert judge(kind, name, model, inputs, capture(model, (), inputs)) == (CERTIFIED, "")


class FrozenView(nn.Module):
    """A view of a parameter that is made where no gradients are recorded (CLIPSeg's class token)."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.up = nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            token = self.token.expand(x.shape[0], 1, 8)
        return self.up(torch.cat([token, x], 1)).square().mean()


def test_a_view_without_gradients() -> None:
    inputs = {"x": torch.randn(8, 3, 8)}
    model = FrozenView()
    graph = capture(model, (), inputs)
    for kind in ("dp=2,tp=2", "drawn"):
        assert judge(kind, "view", model, inputs, graph) == (CERTIFIED, "")


def _models() -> Iterator[tuple[str, str]]:
    for group in ("families", "small", "written", "packages", "unseen"):
        yield from ((group, name) for name in sets()[group][0])


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), list(_models()))
def test_every_model(group: str, name: str) -> None:
    found = list(records([group], [name], PLANS, ()))
    wrong = [each for each in found if each["found"] not in (CERTIFIED, NO_PROGRAM, "no graph")]
    assert not wrong, wrong


def test_the_document_has_a_row_for_each_kind_of_plan() -> None:
    text = DOCUMENT.read_text()
    assert all(f"\n| {kind} | " in text for kind in PLANS)
    record = {"set": TITLES[0], "model": "m", "plan": PLANS[0], "found": CERTIFIED, "why": ""}
    assert table([record])[2].startswith(f"| {PLANS[0]} | 1 of 1 | ")
