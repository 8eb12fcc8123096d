"""What a capture reads of plain objects in modules: other fields of them may change, and are no other program."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.reads import recorded_reads
from autopar.capture.tracing.fake_copy import copy_without_data
from autopar.runtime.plain.frozen_reads import FrozenReads


class Settings:
    """Also read under another name, as fields of transformers' configurations are."""

    def __init__(self) -> None:
        self.scale, self.width, self.saved_by = 0.5, 4.25, ""

    @property
    def size(self) -> float:
        return self.width


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), Settings()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.settings.scale).square().mean() / self.settings.size


def test_only_what_is_read_is_another_program() -> None:
    model = Net()
    with recorded_reads() as record:
        capture(model, (torch.randn(4, 4),))
    assert "__getattribute__" not in vars(Settings)
    frozen = FrozenReads(copy_without_data(model, None), record.reads)
    settings = frozen.model.settings
    assert isinstance(settings, Settings)
    settings.saved_by = "rank 0"
    assert frozen.changed() == ()
    settings.scale = 0.25
    assert [place for place, _ in frozen.changed()] == ["settings.scale"]
    settings.scale, settings.width = 0.5, 3.0
    assert [place for place, _ in frozen.changed()] == ["settings.width"]
    settings.width = 4.25
    assert frozen.changed() == ()
