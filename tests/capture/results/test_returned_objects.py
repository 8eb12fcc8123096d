"""What a model returns beside tuples and dictionaries of texts comes back as it was, also from a plan file."""

from __future__ import annotations

import json
import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, Flag
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Independent, Normal

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ir.interface import Interface
from autopar.ir.plan_file.codec import decode, encode
from autopar.runtime.errors import RuntimeProblem
from autopar.runtime.step.arguments import parts_of
from autopar.runtime.step.results import build_result

X = torch.randn(4, 6)


class Task(Enum):
    FIRST = 1
    SECOND = "b"


class Parts(Flag):
    A = 1
    B = 2


class Scaled:
    """Its method reads an attribute that a class default would hide."""

    _scale = 1.0

    def __init__(self, h: Tensor, scale: float) -> None:
        self.h, self._scale = h, scale
        self._options, self._unused = {"names": ["a"]}, lambda: None
        self._itself = self

    def value(self) -> Tensor:
        return self.h * self._scale


class Slotted:
    """Attributes in slots of the class and of its base, one of which is not set."""

    __slots__ = ("h", "loss")

    def __init__(self, h: Tensor) -> None:
        self.h, self.loss = h, h.square().mean()


class MoreSlots(Slotted):
    __slots__ = ("_scale", "unset")

    def __init__(self, h: Tensor) -> None:
        super().__init__(h)
        self._scale = 3


class PropertyLoss:
    """A loss behind a property, as it is or computed there."""

    def __init__(self, loss: Tensor, logits: Tensor, factor: float = 1.0) -> None:
        self._loss, self.logits, self._factor = loss, logits, factor

    @property
    def loss(self) -> Tensor:
        return self._loss if self._factor == 1.0 else self._loss * self._factor


@dataclass
class Counted:
    h: Tensor
    count: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        self._double = self.h * 2


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.layer = make, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.make(x, self.layer(x))


def both(make: Callable[[Tensor, Tensor], Any], *outputs: str) -> tuple[Any, Any]:
    """The result of the model, and the one of its form, which a file has held, with the outputs of the model."""
    model = Returns(make)
    graph = capture(model, (X,), outputs=outputs)
    assert graph.interface is not None
    form = decode(Interface, json.loads(json.dumps(encode(replace(graph.interface, arguments=()))))).returns
    plain = model(X)
    values = {output.path: dict(paths(plain, ""))[output.path] for output in graph.outputs}
    return plain, build_result(form, torch.tensor(2.0), values)


def paths(item: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors of a result by path."""
    if isinstance(item, Tensor):
        yield path, item
    elif not isinstance(item, (Enum, str)) and (not path or path.count(".") < 5):
        for word, each in parts_of(item):
            yield from paths(each, f"{path}.{word}" if path else word)


KEYS = [(0, 10, 2), (True, False), (Task.SECOND, Task.FIRST), (("u", 1, None), ("v", 2.5)), (1, "1"), (None, torch.float32, int),
        ("a\nb", "c")]  # fmt: skip


@pytest.mark.parametrize("keys", KEYS, ids=str)
@pytest.mark.parametrize("cls", [dict, OrderedDict])
def test_keys_are_the_models_own(keys: tuple[Any, ...], cls: type[Any]) -> None:
    """They came back as texts."""
    plain, found = both(lambda x, h: {"nested": cls((key, h + n) for n, key in enumerate(keys)), "n": 1})
    assert type(found["nested"]) is cls and found["n"] == 1
    assert [(type(key), key) for key in found["nested"]] == [(type(key), key) for key in plain["nested"]]
    assert all(found["nested"][key] is plain["nested"][key] for key in keys)


def test_a_key_that_no_plan_holds_is_refused() -> None:
    with pytest.raises(CaptureError, match="a FakeTensor, which no plan can hold: let its keys be texts, numbers"):
        both(lambda x, h: {torch.zeros(1): h})


def test_private_attributes_come_back() -> None:
    plain, found = both(lambda x, h: Scaled(h, 3.0))
    assert type(found) is Scaled and found._options == {"names": ["a"]} and torch.equal(found.value(), plain.value())
    with pytest.raises(RuntimeProblem, match="_unused of the model's result is a function, which no plan can hold"):
        found._unused()
    counted = both(lambda x, h: Counted(h))
    assert counted[1].count == 3 and counted[1]._double is counted[0]._double


def test_attributes_in_slots_come_back() -> None:
    """They were no attributes: the result was one without a tensor."""
    plain, found = both(lambda x, h: MoreSlots(h), "h")
    assert type(found) is MoreSlots and found.h is plain.h and found.loss.item() == 2.0
    assert found._scale == 3 and not hasattr(found, "unset")


def test_an_object_inside_of_a_result() -> None:
    """It was None, without a word."""

    def forward(x: Tensor, h: Tensor) -> Any:
        return {"loss": h.square().mean(), "state": Scaled(h, 3.0), "words": (Scaled(None, 2.0), 1)}  # type: ignore[arg-type]

    _, found = both(forward)
    assert found["words"][0]._scale == 2.0 and found["words"][1] == 1
    with pytest.raises(RuntimeProblem, match=r'does not return state with gradients on.* pass outputs=\("state",\)'):
        found["state"].value()
    for asked in ("state", "*"):
        plain, found = both(forward, asked)
        assert torch.equal(found["state"].value(), plain["state"].value())


def test_a_cache_of_transformers_is_left_out() -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")

    def forward(x: Tensor, h: Tensor) -> Any:
        cache = cache_utils.DynamicCache()
        cache.update(h[:, None, None], h[:, None, None], 0)
        return {"loss": h.square().mean(), "h": h, "cache": cache}

    for asked in ((), ("*",)):
        _, found = both(forward, *asked)
        with pytest.raises(RuntimeProblem, match="cache of the model's result is a key-value cache.* with parallel.generate"):
            found["cache"].get_seq_length()


@pytest.mark.parametrize("is_decoder", [True, False])
def test_a_cache_is_left_out_where_the_model_makes_one(is_decoder: bool) -> None:
    """A decoder asks for `use_cache`; an encoder of the same class has the field and makes none."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=is_decoder
    )
    ids = torch.zeros(2, 4, dtype=torch.int64)
    for asked in (None, True, False):
        graph = capture(transformers.BertModel(config).eval(), (ids,), {"use_cache": asked})
        assert graph.interface is not None
        assert (("past_key_values", ("cache",)) in graph.interface.returns[-1]) == is_decoder  # type: ignore[index, operator]


def test_a_loss_that_is_a_property() -> None:
    _, found = both(lambda x, h: PropertyLoss(h.square().mean(), h), "logits")
    assert found.loss.item() == 2.0
    plain, found = both(lambda x, h: PropertyLoss(h.square().mean(), h, 0.5))
    assert torch.equal(found.loss, plain.loss)  # which no graph computes


@pytest.mark.parametrize("make", [
    lambda x, h: Normal(h, 1.0), lambda x, h: Independent(Normal(h, h.exp()), 1), lambda x, h: Categorical(logits=h),
    lambda x, h: Beta(F.softplus(h), F.softplus(h) + 1)], ids=["Normal", "Independent", "Categorical", "Beta"])  # fmt: skip
def test_distributions(make: Callable[..., Any]) -> None:
    plain, found = both(lambda x, h: (make(x, h), h))
    draw = plain[0].sample()
    assert torch.equal(found[0].log_prob(draw), plain[0].log_prob(draw)) and found[0].batch_shape == plain[0].batch_shape


def test_results_of_torch_and_containers() -> None:
    plain, found = both(lambda x, h: (h.topk(2), h.max(-1), h.shape[1:], h.size()))
    assert type(found[0]) is type(plain[0]) and found[0].values is plain[0].values and found[1].indices is plain[1].indices
    assert found[2:] == (torch.Size([3]), torch.Size([4, 3]))

    def grouped(x: Tensor, h: Tensor) -> Any:
        groups: dict[str, list[Tensor]] = defaultdict(list)
        groups["h"].append(h)
        return groups

    plain, found = both(grouped)
    assert found["h"] == plain["h"] and found["nothing"] == [] and type(found) is defaultdict
    with pytest.raises(CaptureError, match="a defaultdict of a function"):
        both(lambda x, h: defaultdict(lambda: 0, h=h))


def test_values_with_names() -> None:
    device = torch.device("cpu")
    values = {"task": Task.SECOND, "parts": Parts.A | Parts.B, "dtype": torch.float16, "device": device, "cls": nn.Linear}
    plain, found = both(lambda x, h: {**values, "h": h})
    assert found == plain


def test_a_dictionary_that_is_a_dataclass() -> None:
    """As those of transformers."""
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")
    plain, found = both(lambda x, h: modeling_outputs.CausalLMOutput(logits=h, hidden_states=(h, x + 1)))
    assert type(found) is type(plain) and list(found) == list(plain) and found.loss is None
    assert found[1][1] is plain.hidden_states[1]


class Autoencoder(nn.Module):
    """Returns its input, a parameter, a buffer as it was, and another that nothing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("fixed", torch.ones(6))

    def forward(self, x: Tensor) -> list[Any]:
        h, before = self.layer(x) * self.scale, self.mean.clone()
        self.mean.lerp_(h.detach().mean(0), 0.5)
        return [h, x, self.scale, before, self.fixed, {"x": x}]


def test_inputs_parameters_and_buffers_are_returned() -> None:
    """They were refused."""
    graph = capture(Autoencoder(), (X,))
    blocks = {block.name: block for block in graph.blocks}
    nodes = [node for call in graph.calls for node in blocks[call.block].nodes]
    copied = [node.operands()[0] for node in nodes if node.op == "aten.clone"]
    assert set(copied) == {"x", "scale", "mean", "fixed"} and [output.path for output in graph.outputs][1:] == [*"1234", "5.x"]
    ops = [node.op for node in nodes if node.operands()[:1] == ("mean",)]
    assert ops.index("aten.clone") < ops.index("aten.lerp.Scalar")  # as it was


def test_a_plan_names_nothing_that_is_called() -> None:
    loss = torch.zeros(())
    assert build_result(("member", "os:getcwd", ("constant", 3)), loss, {}) == 3
    made = build_result(("defaultdict", ("named", "os:getcwd"), ("dict", ())), loss, {})
    with pytest.raises(KeyError):
        made["x"]
    with pytest.raises(CaptureError, match="give it a class"):
        both(lambda x, h: defaultdict(os.getcwd, {"h": h}))


class Rebinds(nn.Module):
    """Assigns a buffer, and returns what it was, or a copy of that."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.copies, self.linear = copies, nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, before = self.linear(x), self.mean.clone() if self.copies else self.mean
        self.mean = y.detach().mean(0)
        return y.square().mean(), before


def test_a_buffer_as_it_was_is_returned_as_a_copy() -> None:
    assert len(capture(Rebinds(True), (torch.ones(4, 3),), outputs=("1",)).outputs) == 1
    with pytest.raises(CaptureError, match=r"return a copy that is made before \(self.mean.clone\(\)\)"):
        capture(Rebinds(False), (torch.ones(4, 3),), outputs=("1",))


class TwoKeys(dict[str, Any]):
    def __init__(self, one: Any, two: Any) -> None:
        super().__init__(one=one, two=two)


def test_more_dictionaries() -> None:
    plain, found = both(lambda x, h: TwoKeys(h, h * 2))
    assert type(found) is TwoKeys and found["two"] is plain["two"]
    plain, found = both(lambda x, h: MappingProxyType({"a": h, "b": 3}))
    assert found["a"] is plain["a"] and found["b"] == 3
    plain, found = both(lambda x, h: {"0": h, 0: h + 1, "'0'": h + 2, None: h + 3})
    assert list(found) == list(plain) and all(found[key] is plain[key] for key in plain)
    with pytest.raises(CaptureError, match="two tensors at a.b"):
        both(lambda x, h: {"a.b": h, "a": {"b": h + 1}})
