"""State of Python that a forward changes: what its next call reads is refused, caches are not, and all of it is as before."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.capture import capture
from autopar.capture.state.python_state import PlainState
from autopar.errors import CaptureError


class Slots:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = torch.zeros(4)


class Once(dict[Any, Any]):
    """A dictionary that allows no second write of a key."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if key in self:
            raise KeyError(key)
        super().__setitem__(key, value)


Compute = Callable[[Any, Tensor], Any]


class Net(nn.Module):
    """`compute` gets the result of a linear layer."""

    scale: Any = None

    def __init__(self, compute: Compute, **attributes: Any) -> None:
        super().__init__()
        self.compute = compute
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.compute(self, self.linear(x))
        return result.square().mean()


def hidden(model: Any, y: Tensor) -> Tensor:
    if model.first:
        model.hidden, model.first = torch.zeros(4), False
    y = y + model.hidden
    model.hidden = y.detach().mean(0)
    return y


def once(change: Compute) -> Compute:
    def compute(model: Any, y: Tensor) -> Any:
        first, model.first = model.first, False
        return change(model, y) if first else y

    return compute


def warm(model: Any, y: Tensor) -> Tensor:
    if model.warm is not None:
        y, model.warm = y * model.warm, None
    return y


def count(model: Any, y: Tensor) -> Tensor:
    if model.number is None:
        model.number = torch.zeros(())
    model.number += 1
    return y * model.number


def average(model: Any, y: Tensor) -> Tensor:
    model.running = 0.9 * model.running + 0.1 * y.detach().mean().item()
    return y * model.running


def take(model: Any, y: Tensor) -> Tensor:
    before = model.__dict__.get("before")
    model.before = y.detach().mean(0)
    return y if before is None else y + before


def in_slots(model: Any, y: Tensor) -> Tensor:
    y = y + model.object.held
    model.object.held = y.detach().mean(0)
    return y


def turn(model: Any, y: Tensor) -> Tensor:
    y, model.function = model.function(y), torch.tanh if model.function is torch.relu else torch.relu
    return y


def add_to_array(model: Any, y: Tensor) -> Tensor:
    model.array += 1
    return y * float(model.array[0])


def count_in_the_class(model: Any, y: Tensor) -> Tensor:
    type(model).scale = (model.scale or 0) + 1
    return y * torch.tensor(float(model.scale))


def assert_cleared(model: Any, y: Tensor) -> Tensor:
    assert model.left is None, "clear it first"
    model.left = y
    return y


REFUSALS: dict[str, tuple[Compute, dict[str, Any], str]] = {
    "a hidden state after a flag": (hidden, {"first": True}, "keeps hidden for the next one"),
    "another constant at first": (once(lambda model, y: y * 0.5), {"first": True}, "call the model once before this"),
    "another weight at first": (once(lambda model, y: model.other(y)), {"first": True}, "call the model once before this"),
    "a list that gets shorter": (lambda model, y: y * model.list.pop(), {"list": [1.0, 2.0, 3.0]}, "changes list"),
    "an attribute that goes": (warm, {"warm": torch.ones(4)}, "changes warm, and then computes something else"),
    "a tensor that counts in place": (count, {"number": None}, "changes number in every call"),
    "a running number of the batch": (average, {"running": 0.0}, "counts in running"),
    "past setattr": (take, {}, "keeps before for the next one"),
    "an object with slots": (in_slots, {"object": Slots()}, "keeps object.held for the next one"),
    "a function": (turn, {"function": torch.relu}, "counts in function"),
    "an array": (add_to_array, {"array": numpy.zeros(1)}, "counts in array"),
    "an attribute of the class, as a tensor": (count_in_the_class, {}, "counts in Net.scale"),
    "a second call that fails": (assert_cleared, {"left": None}, "changes left, and fails in its next call"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_its_line(case: str) -> None:
    compute, attributes, words = REFUSALS[case]
    line = "" if "of the class" in case else r"test_states.py:\d+: "  # who sets an attribute of a class is not recorded
    with pytest.raises(CaptureError, match=f"{line}the forward .*{words}"):
        capture(Net(compute, **attributes), (torch.rand(4, 4),))


MEMO: dict[int, Tensor] = {}


def of_defaults(number: int, memo: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 (what this is about)
    return memo.setdefault(number, torch.ones(number))


def of_class(model: Any, y: Tensor) -> Tensor:
    if type(model).scale is None:
        type(model).scale = torch.ones(4)
    return y * model.scale


def of_global(model: Any, y: Tensor) -> Tensor:
    return y * MEMO.setdefault(4, torch.ones(4))


def by_weight(model: Any, y: Tensor) -> Tensor:
    for parameter in model.parameters():
        model.dictionary.setdefault(parameter, {})["mask"] = torch.ones(4)
    return y * model.dictionary[model.linear.weight]["mask"]


def branch(model: Any, y: Tensor) -> Tensor:
    if model.mask is None:
        model.mask = torch.ones(4)
    result: Tensor = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y * model.mask,))
    return result


def leave(model: Any, y: Tensor) -> Tensor:
    model.dictionary["y"] = y.detach()
    return y


def leave_once(model: Any, y: Tensor) -> Tensor:
    if "mask" not in model.dictionary:
        model.dictionary["mask"] = torch.ones(4)
    return y * model.dictionary["mask"]


CACHES: dict[str, tuple[Compute, dict[str, Any]]] = {
    "a default of a function": (lambda model, y: y * of_defaults(4), {}),
    "an attribute of the class": (of_class, {}),
    "a global": (of_global, {}),
    "by weights": (by_weight, {"dictionary": {}}),
    "beside a branch": (branch, {"mask": None}),
    "in a dictionary in order": (leave, {"dictionary": OrderedDict()}),
    "in a dictionary that is written once": (leave_once, {"dictionary": Once()}),
}


@pytest.mark.parametrize("case", CACHES)
def test_a_cache_is_allowed_and_nothing_of_the_capture_stays(case: str) -> None:
    compute, attributes = CACHES[case]
    model = Net(compute, **attributes)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            capture(model, (torch.rand(4, 4),))
        state = PlainState(model, None)
        assert not any(isinstance(each, FakeTensor) for leaf in state.leaves().values() for each in leaf.tensors)
        assert not MEMO and Net.scale is None and of_defaults.__defaults__ == ({},)


def test_what_another_thread_puts_there_stays() -> None:
    shared: dict[Any, Any] = {}
    values: list[float] = []

    def compute(model: Any, y: Tensor) -> Tensor:
        shared["other thread"] = object()
        shared.setdefault("mask", torch.ones(4))
        values.append(1.0)
        return y * shared["mask"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        capture(Net(compute), (torch.rand(4, 4),))
    assert list(shared) == ["other thread"] and set(values) == {1.0}
