"""The state of an optimizer between a parallel model and the plain one, by position: groups in an order of their own, parameters
that no forward uses, names of parameters, and stages without parameters of a group."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.harness.habits import refusal
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import autopar

LAYERS = 4
Groups = Callable[[nn.Module], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(8, 8) for _ in range(LAYERS))
        self.mask_token, self.head = nn.Parameter(torch.zeros(8)), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.body:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 8, generator=generator), "y": torch.randint(0, 4, (8,), generator=generator)}


def named(model: nn.Module, *prefixes: str) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix in prefixes:
        yield from ((name, each) for name, each in model.named_parameters() if name.startswith(prefix))


def some(model: nn.Module, *prefixes: str) -> list[nn.Parameter]:
    return [each for _, each in named(model, *prefixes)]


TOP_FIRST = ("head", *(f"body.{number}" for number in reversed(range(LAYERS))))


def decayed(model: nn.Module) -> Any:
    every = list(model.parameters())
    return [{"params": [p for p in every if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in every if p.dim() <= 1]}]


def without_first(model: nn.Module) -> Any:
    for parameter in some(model, "body.0"):
        parameter.requires_grad_(False)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shuffled(model: nn.Module) -> Any:
    return some(model, "body.1", "body.0", "body.2", "head", "body.3")


def by_layer(model: nn.Module) -> Any:
    layers = [{"params": some(model, "mask_token", f"body.{number}")} for number in range(LAYERS)]
    layers = [layers[0], *({"params": each["params"][1:]} for each in layers[1:])]
    return [*layers, {"params": some(model, "head")}]


GROUPS: dict[str, Groups] = {
    "shuffled": shuffled,
    "by_layer": by_layer,
    "decayed": decayed,
    "backwards": lambda model: some(model, *TOP_FIRST),
    "head_first": lambda model: [{"params": some(model, "head"), "lr": 2e-2}, {"params": some(model, *TOP_FIRST[1:])}],
    "names": lambda model: named(model, ""),
    "names_backwards": lambda model: named(model, *TOP_FIRST[1:]),
    "without_first": without_first,
}


def train(model: Any, optimizer: torch.optim.Optimizer, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        loss = model(**batch(seed))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module, groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2)


def same_losses(one: list[float], other: list[float], name: str) -> None:
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-9, atol=1e-9, msg=name)


def both_ways(plan: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(1)
        first = Net()
        parallel: Any = autopar.parallelize(copy.deepcopy(first), "local:2", batch(0), force=plan, cache=False)
        for name, groups in GROUPS.items():
            plain = copy.deepcopy(first)
            parallel.load_full_state(plain.state_dict())
            own, theirs = optimizer_of(parallel, groups), optimizer_of(plain, groups)
            same_losses(train(parallel, own, range(2)), train(plain, theirs, range(2)), name)
            state = parallel.full_optimizer_state(own)
            names_of_groups = [each.get("param_names") for each in theirs.state_dict()["param_groups"]]
            assert [each.get("param_names") for each in state["param_groups"]] == names_of_groups, name
            to_plain = copy.deepcopy(plain)
            taken = optimizer_of(to_plain, groups)
            taken.load_state_dict(state)
            saved = copy.deepcopy(theirs.state_dict())
            expected = train(plain, theirs, range(2, 4))
            same_losses(train(to_plain, taken, range(2, 4)), expected, f"{name}, to plain")
            new = optimizer_of(parallel, groups)
            parallel.load_full_optimizer_state(new, saved)
            same_losses(train(parallel, new, range(2, 4)), expected, f"{name}, from plain")
            names = {id(each): key for key, each in parallel.named_parameters()}
            for group in new.param_groups:
                assert group.get("param_names") in (None, [names[id(each)] for each in group["params"]])
            for parameter in parallel.parameters():
                parameter.requires_grad_(True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plan", ["dp=2,zero=3", "pp=2,dp=1"])
def test_groups_of_one_process(ranks: RankPool, plan: str) -> None:
    ranks.run(both_ways, plan, world=2)


def fewer(plan: str) -> str:
    plain = Net()
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", batch(0), force=plan, cache=False)
    every, some_of_them = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(some(parallel, "body"))
    train(plain, every, range(1))
    return refusal(lambda: parallel.load_full_optimizer_state(some_of_them, every.state_dict()))


def test_a_state_of_more_parameters_is_refused(ranks: RankPool) -> None:
    for said in ranks.run(fewer, "pp=2,dp=1", world=2):
        assert "has 11 parameters, this one has 8: give it the same groups" in said


def checkpoint(folder: str) -> None:
    torch.manual_seed(1)
    plain = Net()
    parallel: Any = autopar.parallelize(copy.deepcopy(plain), "local:2", batch(0), force="pp=2,dp=1", cache=False)
    for number, flat in enumerate((True, False)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        for groups in (GROUPS["head_first"], lambda model: some(model, "head")):
            optimizer = optimizer_of(parallel, groups)
            train(parallel, optimizer, range(2))
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            model_state, state = get_state_dict(parallel, optimizer, options=options)
            if flat:
                dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/{number}{len(sizes)}")
            before = copy.deepcopy(parallel.full_optimizer_state(optimizer))
            new = optimizer_of(parallel, groups)
            if flat:
                model_state, state = get_state_dict(parallel, new, options=options)
                dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=f"{folder}/{number}{len(sizes)}")
            set_state_dict(parallel, new, model_state_dict=model_state, optim_state_dict=state, options=options)
            torch.testing.assert_close(parallel.full_optimizer_state(new)["state"], before["state"])
            assert [len(group["params"]) for group in new.param_groups] == sizes


def test_torchs_checkpoints_of_stages_without_parameters_of_a_group(ranks: RankPool, tmp_path: Any) -> None:
    ranks.run(checkpoint, str(tmp_path), world=2)
