"""State dicts are loaded with the model's own code: hooks, conversions of old keys, extra state."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar

WIDTH, PLANS = 8, ("dp=2,tp=1,zero=3,pp=1", "tp=2,dp=1,pp=1", "pp=2,dp=1,tp=1")


class Scaled(nn.Linear):
    """Reads its extra state in the forward, and takes an old name of its bias."""

    factor = 1.0

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if prefix + "shift" in state_dict:
            state_dict[prefix + "bias"] = state_dict.pop(prefix + "shift") + self.bias.detach()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Stack(nn.Module):
    loads = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(WIDTH, WIDTH) for _ in range(4))
        self.again = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again.weight = self.layers[0].weight
        self.spare = nn.Linear(2, 2)
        self.register_load_state_dict_post_hook(Stack.count)

    @staticmethod
    def count(module: Any, keys: Any) -> None:
        module.loads += 1
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if key != "old"]

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({key.removeprefix("module."): each for key, each in state_dict.items()}, strict)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.again(x).square().mean()  # type: ignore[no-any-return]


class Rooted(Stack):
    """With extra state of its own, which is computed of a parameter."""

    def get_extra_state(self) -> float:
        return float(self.layers[0].weight.sum())

    def set_extra_state(self, state: float) -> None:
        self.total = state


def stack(kind: type[Stack] = Stack) -> Stack:
    torch.manual_seed(0)
    return kind().double()


def halve(module: nn.Module, state: dict[str, Tensor], prefix: str, *args: Any) -> None:
    if (key := prefix + "weight") in state:
        state[key] = state[key] * 0.5


def clear(module: Any, keys: Any) -> None:
    module.weight.data.zero_()


def rename(state: dict[str, Any]) -> dict[str, Any]:
    return {key.replace("2.bias", "2.shift"): each for key, each in state.items()} | {"old": torch.ones(1)}


def of_the_layer(model: Any) -> dict[str, Any]:
    return OrderedDict((name.removeprefix("layers.2."), each) for name, each in state_of(model).items() if "layers.2" in name)


def state_of(model: Any) -> dict[str, Any]:
    return dict(model.full_state() if hasattr(model, "full_state") else copy.deepcopy(model.state_dict()))


def set_factor(model: Any) -> None:
    model.layers[3].factor = 2.5


LOADS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "all": lambda model, state: model.load_state_dict(state),
    "with prefixes": lambda model, state: model.load_state_dict({f"module.{key}": each for key, each in state.items()}),
    "an old key": lambda model, state: model.load_state_dict(rename(state)),
    "a part": lambda model, state: model.load_state_dict({"layers.2.shift": state["layers.2.bias"]}, strict=False),
    "hook of a part": lambda model, state: model.layers[2].register_load_state_dict_pre_hook(halve),
    "with the hook": lambda model, state: model.load_state_dict(state),
    "a layer": lambda model, state: model.layers[2].load_state_dict(of_the_layer(stack())),
    "a tied layer": lambda model, state: model.again.load_state_dict({"weight": state["layers.0.weight"] * 3}),
    "an attribute": lambda model, state: set_factor(model),
    "a layer's own": lambda model, state: model.layers[2].load_state_dict(of_the_layer(model)),
}


def loads(plan: str) -> None:
    """On a rank: each load, one after the other, on the plain and the parallel model."""
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
    plain, other = stack(), stack()
    parallel: Any = autopar.parallelize(stack(), "local:2", (x,), force=plan, cache=False)
    other.layers[1].factor = 3.0
    for parameter in other.parameters():
        parameter.data *= 1.5
    for name, load in LOADS.items():
        found, expected = (load(model, copy.copy(other.state_dict())) for model in (parallel, plain))
        if hasattr(expected, "missing_keys"):
            assert [sorted(keys) for keys in found] == [sorted(keys) for keys in expected], name
        assert parallel.loads == plain.loads, name
        state = state_of(parallel)
        for key, value in state_of(plain).items():
            assert state[key] == value if isinstance(value, dict) else torch.equal(state[key], value), (name, key)
        torch.testing.assert_close(parallel(x).detach(), plain(x).detach(), rtol=1e-12, atol=0, msg=name)
    with pytest.raises(autopar.errors.StateError, match=r"\AError.* Missing key.*: pass that of the plain model, or .*\Z"):
        parallel.load_state_dict({"layers.0.weight": other.again.weight})
    twin, sharded = copy.deepcopy(parallel), parallel.state_dict()
    assert sharded["layers.3._extra_state"] == {"factor": 2.5}
    parallel.layers[3].factor = 1.0
    parallel.layers[2].register_load_state_dict_post_hook(clear)
    parallel.load_state_dict(sharded)
    assert parallel.layers[3].factor == 2.5 and twin(x).item() == pytest.approx(plain(x).item(), rel=1e-12)
    clear(plain.layers[2], None)
    torch.testing.assert_close(parallel(x).detach(), plain(x).detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("plan", PLANS)
def test_the_code_of_the_model_runs_at_a_load(ranks: RankPool, plan: str) -> None:
    """Only the tensors with the keys of today were loaded: others had their old values, or those that a hook would change."""
    ranks.run(loads, plan, world=2)


def extra_state_of_the_root() -> None:
    parallel: Any = autopar.parallelize(stack(Rooted), "local:1", (torch.ones(4, WIDTH, dtype=torch.float64),), cache=False)
    with torch.no_grad():
        parallel.layers[0].weight.mul_(2)
    assert parallel.full_state()["_extra_state"] == pytest.approx(2 * stack().layers[0].weight.sum().item())
    with pytest.raises(autopar.errors.StateError, match=r"^Rooted.get_extra_state reads parameters or buffers"):
        parallel.state_dict()
    parallel.load_full_state(stack(Rooted).state_dict() | {"_extra_state": 7.0})
    assert parallel.total == 7.0


def test_extra_state_is_that_of_now(ranks: RankPool) -> None:
    ranks.run(extra_state_of_the_root, world=1)
