"""Weights of other stages of a pipeline: initialised where they are, loaded by parts, or refused on all ranks in one line; and
state dicts with tied weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.harness.comparison import same_state
from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x))
        return y.square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)
        self.head.weight = self.words.weight

    def forward(self, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(y)), y)


def initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.25)
        nn.init.zeros_(module.bias)
        module.bias.data[0].fill_(2.0)
        module.weight.data.mul_(0.5).clamp_(max=1.0)
        with torch.no_grad():
            module.bias[1] = 3.0
            module.weight.data = torch.ones_like(torch.empty(module.weight.shape)) * module.weight.shape[1]


def stages() -> str:
    torch.manual_seed(0)
    plain: Any = Net()
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", (torch.randn(4, 6),), force="pp=2", cache=False)
    for model in (plain, parallel):
        model.apply(initialise)
        assert [tuple(model.get_parameter(name).shape) for name in ("body.0.weight", "head.weight")] == [(32, 6), (4, 16)]
    same_state(parallel, plain)
    for name, _ in plain.named_parameters():
        for function in (nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.kaiming_uniform_):
            if name.endswith("weight"):
                function(parallel.get_parameter(name))
    new = Net()
    plain.body.load_state_dict(new.body.state_dict())
    parallel.body.load_state_dict(new.body.state_dict())
    assert all(torch.equal(parallel.full_state()[f"body.{name}"], each) for name, each in new.body.state_dict().items())
    assert "misses body.0.bias and has body.more" in refusal(
        lambda: parallel.body.load_state_dict(
            {**{k: v for k, v in new.body.state_dict().items() if k != "0.bias"}, "more": torch.zeros(1)}
        )
    )
    state = plain.state_dict()
    with pytest.raises(RuntimeError, match='consume_prefix_in_state_dict_if_present.state_dict, "module."'):
        parallel.load_state_dict({f"module.{name}": each for name, each in state.items()})
    with pytest.raises(RuntimeError, match="head.weight has shape .* strict=False"):
        parallel.load_state_dict(state | {"head.weight": torch.zeros(3, 16)})
    own = torch.optim.AdamW(plain.parameters())
    plain(torch.randn(4, 6)).backward()
    own.step()
    optimizer = torch.optim.AdamW(parallel.parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parallel.get_parameter(name).copy_(parameter.detach())
            assert torch.equal(parallel.get_parameter(name).full_tensor(), parameter)
    new.load_state_dict(parallel.state_dict())
    assert all(torch.equal(each, plain.state_dict()[name]) for name, each in new.state_dict().items())
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(own.state_dict())
    return refusal(optimizer.step)


def test_weights_of_other_stages(ranks: RankPool) -> None:
    for optimizer in ranks.run(stages, world=2):
        assert "parallel.load_full_optimizer_state(optimizer, state)" in optimizer


def tied(folder: str) -> None:
    y = torch.arange(8)
    plain = Tied()
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", (y,), force="dp=2,zero=3", cache=False)
    state = parallel.state_dict()
    assert list(state) == list(plain.state_dict()) and "weight" in parallel.head.state_dict()
    new = Tied()
    new.load_state_dict(state)
    before = copy.deepcopy(state)
    dcp.save(state, checkpoint_id=folder)
    file = io.BytesIO()
    torch.save(before, file)
    for load in ("memory", "file", "checkpoint"):
        parallel.load_full_state({name: each + 1 for name, each in plain.state_dict().items()})
        if load == "checkpoint":
            before = parallel.state_dict()
            dcp.load(before, checkpoint_id=folder)
        elif load == "file":
            before = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert not any(parallel.load_state_dict(before))
        same_state(parallel, new)
    wrapper = nn.ModuleList([parallel])
    wrapper.load_state_dict(wrapper.state_dict())
    same_state(parallel, new)


def test_tied_weights_have_all_their_names(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(tied, str(tmp_path), world=2)


def alone() -> list[str]:
    """On a rank: what each call says that rank 0 alone does, while rank 1 calls the model; then a call of both."""
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    parallel: Any = autopar.parallelize(Net(), "local:2", (x,), force="pp=2", cache=False)
    optimizer = torch.optim.AdamW(parallel.parameters())
    calls = {
        "full_optimizer_state": lambda: parallel.full_optimizer_state(optimizer),
        "load_state_dict": lambda: parallel.load_state_dict(Net().state_dict()),
    }
    lines = [refusal(call if dist.get_rank() == 0 else lambda: parallel(x)) for call in calls.values()]
    assert parallel(x).isfinite()
    return lines


def test_values_of_two_gathers_are_not_taken_for_each_other(ranks: RankPool) -> None:
    """A stage's gather of an optimizer's state met the gather of another one's refusal, on one group of two ranks."""
    first, second = ranks.run(alone, world=2)
    assert first == second
    for line, name in zip(first, ("full_optimizer_state", "load_state_dict"), strict=True):
        assert f": {name} needs every rank; take it out of `if rank == 0:`" in line, line
