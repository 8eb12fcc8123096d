"""What a capture reads of plain objects in modules: other fields of them may change, and are no other program."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, is_grad_enabled, nn

from autopar.capture import capture
from autopar.capture.state.reads import recorded_reads
from autopar.capture.tracing.fake_copy import copy_without_data
from autopar.errors import CaptureError
from autopar.runtime.plain.code_reads import code_of
from autopar.runtime.plain.frozen_reads import FrozenReads, Reads


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


class Shared:
    """Settings of all that are made of it; `unread` by no forward."""

    factor, unread = 2.0, 1.0


class OwnShared(Shared):
    pass


class Base(nn.Module):
    gain = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), OwnShared()

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.gain * self.shared.factor).square().mean()


class Derived(Base):
    pass


@pytest.mark.parametrize(
    ("kind", "name", "place"),
    [
        (Base, "gain", "Base.gain"),
        (Derived, "gain", "Derived.gain"),
        (Shared, "factor", "shared.factor"),
        (OwnShared, "factor", "shared.factor"),
        (Shared, "unread", ""),
    ],
)
def test_attributes_of_classes(kind: type, name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the class itself, of one that hides them, and of a class whose objects are attributes of modules."""
    model = Derived()
    with recorded_reads() as record:
        capture(model, (torch.randn(4, 4),))
    frozen = FrozenReads(copy_without_data(model, None), record.reads)
    assert frozen.changed() == ()
    monkeypatch.setattr(kind, name, 7.0, raising=False)
    assert [each for each, _ in frozen.changed()] == ([place] if place else [])
    monkeypatch.undo()
    assert frozen.changed() == ()


def test_attributes_of_classes_that_a_module_got_since() -> None:
    """In a copy, and when a further program reads more, it was taken for the value of the first program."""
    model = Derived()
    with recorded_reads() as record:
        capture(model, (torch.randn(4, 4),))
    frozen = FrozenReads(copy_without_data(model, None), record.reads)
    frozen.model.gain = 7.0
    assert [each for each, _ in frozen.changed()] == ["gain"]
    copied = frozen.copied(copy.deepcopy(frozen.model))
    frozen.add(Reads(frozenset({(f"{Derived.__module__}.Derived", "more")})))
    for each in (frozen, copied):
        assert [place for place, _ in each.changed()] == ["gain"]
        del each.model.gain
        assert each.changed() == ()


class Limits:
    low, high, unread = -1.0, 1.0, 0.0


class OwnLimits(Limits):
    pass


LIMITS = OwnLimits()


class Clamp(nn.Module):
    """Reads attributes of classes through another class, and through an object that is a global."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(OwnLimits.low, LIMITS.high).square().mean()


@pytest.mark.parametrize("name", ["low", "high", "unread"])
@pytest.mark.parametrize("kind", [Limits, OwnLimits])
def test_inherited_attributes_of_global_classes(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, model = code_of(Clamp()), copy_without_data(Clamp(), None)
    frozen = FrozenReads(model, Reads(), code.names, code.modules)
    monkeypatch.setattr(kind, name, 0.5, raising=False)
    expected = [] if name == "unread" else [f"{kind.__module__}.{kind.__qualname__}.{name}"]
    assert [each for each, _ in frozen.changed()] == expected
    monkeypatch.undo()
    assert frozen.changed() == ()


class Gradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if torch.is_grad_enabled() else x.sin()


class NamedGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if is_grad_enabled() else x.sin()


class InputGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() if x.requires_grad else x.sin()


@pytest.mark.parametrize("kind", [Gradients, NamedGradients, InputGradients])
def test_a_forward_that_asks_for_gradients_is_another_one_without(kind: type) -> None:
    frozen = FrozenReads(copy_without_data(kind(), None), Reads(), code_of(kind()).names)
    x = torch.ones(4, requires_grad=True)
    with torch.no_grad():
        assert frozen.changed() == (("torch.is_grad_enabled()", "False"),)
        x = x.detach()
        ops = {node.op for block in capture(kind(), (x,)).blocks for node in block.nodes}
        assert "aten.sin" in ops and "aten.exp" not in ops
    assert frozen.changed() == ()


def test_a_forward_sees_which_inputs_take_gradients() -> None:
    x = torch.ones(4)
    ops = {node.op for block in capture(InputGradients(), (x.requires_grad_(),)).blocks for node in block.nodes}
    assert "aten.exp" in ops and "aten.sin" not in ops


def test_libraries_may_ask_for_gradients() -> None:
    layer = nn.TransformerEncoderLayer(4, 2)  # which asks torch.is_grad_enabled()
    assert code_of(nn.Sequential(layer)).names == ()


class InferenceMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if torch.is_inference_mode_enabled() else x + 1


def test_the_inference_mode_is_warned_of() -> None:
    line = InferenceMode.forward.__code__.co_firstlineno + 1
    assert code_of(InferenceMode()).outside == (f"{__file__}:{line} asks torch.is_inference_mode_enabled()",)


class Stateful(nn.Module):
    """Keeps a hidden state, and leaves two tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden, self.maps = nn.Linear(4, 4), torch.zeros(4), []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.hidden
        self.hidden = y.detach().mean(0)
        return y


class Forgetful(nn.Module):
    """A loss with an attribute of the same name as the model's."""

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        self.hidden = None
        return (y - target).square().mean()


class Recorder(Stateful):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.maps.extend((y.detach(), 2 * y.detach()))
        return y.square().mean()


def test_a_loss_takes_no_state_of_the_model_away() -> None:
    with pytest.raises(CaptureError, match=r"test_reads.py:\d+.* keeps hidden for the next one"):
        capture(Stateful(), (torch.rand(4, 4), torch.rand(4, 4)), loss_fn=Forgetful())


def test_a_list_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"test_reads.py:\d+.* leaves tensors in maps") as said:
        capture(Recorder(), (torch.rand(4, 4),))
    assert len([each for each in said if "maps" in str(each.message)]) == 1
