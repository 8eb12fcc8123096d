"""Several models in one call of `parallelize`: planned together for one memory, trained as one process does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

import autopar
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.joint_plan import Share
from autopar.options import PlanOptions
from autopar.planning import plan_with

WIDTH, LAYERS = 64, 8
WEIGHT_BYTES = 8 * LAYERS * 2 * 4 * WIDTH**2
ROOM = 3.3
"""Copies of the weights that a device has room for: each model fits with whole weights on each rank, both do not."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def devices(weights: float, size: int = 2) -> Cluster:
    """A cluster whose devices have room for so many copies of a model's weights beside the process."""
    cluster = Cluster.parse(f"local:{size}")
    device = replace(cluster.device, memory_bytes=int(weights * WEIGHT_BYTES) + cluster.device.base_bytes)
    return replace(cluster, device=device, groups=tuple(replace(each, device=device) for each in cluster.groups))


def example() -> tuple[Tensor]:
    return (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),)


def policy_and_reference() -> tuple[Net, Net]:
    torch.manual_seed(0)
    policy = Net().double()
    return policy, copy.deepcopy(policy).requires_grad_(False).eval()


OPTIONS: dict[str, Any] = dict(force="dp=2", memory_margin=0.0, cache=False)


def share(model: nn.Module, weights: float) -> Share:
    plan = plan_with(model, devices(weights), example(), PlanOptions(force="dp=2", memory_margin=0.0))
    return Share.of(plan, "adamw")


def test_a_frozen_model_holds_its_weights_alone() -> None:
    policy, reference = (share(model, 20) for model in policy_and_reference())
    assert reference.held_bytes == pytest.approx(WEIGHT_BYTES, rel=0.05)
    assert policy.held_bytes > 2 * WEIGHT_BYTES
    for each in (policy, reference):
        assert each.held_bytes <= each.own_bytes <= each.budget_bytes


def local_bytes(model: nn.Module) -> int:
    return sum(parameter.to_local().nbytes for parameter in model.parameters())  # type: ignore[operator]


def preference_steps(weights: float) -> tuple[list[float], list[float], list[int], list[int]]:
    """Losses of the ranks and of one process; bytes of weights on this rank, and what the plans leave to the other model."""
    plain = policy_and_reference()
    parallel = autopar.parallelize(list(policy_and_reference()), devices(weights), [example(), example()], **OPTIONS)
    losses: tuple[list[float], list[float]] = ([], [])
    for (policy, reference), said in zip((parallel, plain), losses, strict=True):
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
        for step in range(3):
            good = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            with torch.no_grad():
                wanted = reference(good).square().mean(-1)
            loss = -logsigmoid(policy(good).square().mean(-1) - wanted).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            said.append(loss.item())
    held = [model.plan.document.cluster.description["device"]["held_bytes"] for model in parallel]
    return *losses, [local_bytes(model) for model in parallel], held


def adversarial_steps() -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain = [Net().double(), Net().double()]
    parallel = autopar.parallelize(
        copy.deepcopy(plain), devices(8), [example(), example()], optimizer=["adamw", "sgd"], **OPTIONS
    )
    losses: tuple[list[float], list[float]] = ([], [])
    for (generator, judge), said in zip((parallel, plain), losses, strict=True):
        adam, sgd = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.SGD(judge.parameters(), 1e-3)
        for step in range(3):
            real, noise = (torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(9 * step + i)).double() for i in (1, 2))
            fake = generator(noise)
            judge.zero_grad()
            first = (judge(real) - 1).square().mean() + judge(fake.detach()).square().mean()
            first.backward()
            sgd.step()
            generator.zero_grad()
            second = (judge(fake) - 1).square().mean()
            second.backward()
            adam.step()
            said.extend((first.item(), second.item()))
    return losses


def groups_of_two_models() -> tuple[int, int]:
    """Process groups after a joint call, and after a further model of the same mesh."""
    autopar.parallelize(list(policy_and_reference()), devices(20), [example(), example()], **OPTIONS)
    before = len(dist.distributed_c10d._world.pg_map)
    autopar.parallelize(policy_and_reference()[0], devices(20), example(), **OPTIONS)
    return before, len(dist.distributed_c10d._world.pg_map)


def test_a_policy_and_its_reference_share_the_memory(ranks: RankPool) -> None:
    alone = [share(model, ROOM) for model in policy_and_reference()]
    assert alone[0].held_bytes + alone[1].own_bytes > alone[0].budget_bytes, "both fit as if they were alone"
    for found, expected, weights, held in ranks.run(preference_steps, ROOM, world=2):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert weights[1] < 0.6 * WEIGHT_BYTES, "the joint plan shards the reference"
        assert all(held)
    _, _, weights, held = ranks.run(preference_steps, 20, world=2)[0]
    assert weights[1] >= WEIGHT_BYTES, "with room for both each has its own fastest plan"
    assert all(held), "and says what the other holds"


def test_two_models_that_are_trained(ranks: RankPool) -> None:
    for found, expected in ranks.run(adversarial_steps, world=2):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_models_of_one_mesh_share_its_groups(ranks: RankPool) -> None:
    before, after = ranks.run(groups_of_two_models, world=2)[0]
    assert before == after


def refused(weights: float) -> str:
    with pytest.raises(AutoparError) as problem:
        autopar.parallelize(list(policy_and_reference()), devices(weights), [example(), example()], **OPTIONS)
    return str(problem.value)


def test_too_little_for_both_is_one_line(ranks: RankPool) -> None:
    lines = ranks.run(refused, 2.6, world=2)
    assert lines[0] == lines[1]
    assert "2 models do not fit together on local:2" in lines[0] and "\n" not in lines[0]


def wrong_calls() -> Iterator[tuple[dict[str, Any], str]]:
    pair, inputs = list(policy_and_reference()), [example(), example()]
    yield dict(model=pair, example_inputs=example()), "pass example_inputs=\\[...\\], one for each model"
    yield dict(model=pair), "pass example_inputs=\\[...\\], one for each model"
    yield dict(model=[], example_inputs=[]), "pass a list of models, each of them once"
    yield dict(model=[pair[0]] * 2, example_inputs=inputs), "each of them once"
    tied = [nn.Sequential(pair[0]), pair[0]]
    yield dict(model=tied, example_inputs=inputs), "models 0 and 1 share the parameter .*: put both into one module"
    yield dict(model=pair, example_inputs=inputs, optimizer=["adamw"]), "optimizer= has 1 entries for 2 models"
    yield dict(model=pair, example_inputs=inputs, beside=[None]), "put all models into the list"


def test_what_is_no_call_of_several_models() -> None:
    for options, line in wrong_calls():
        with pytest.raises(AutoparError, match=line):
            autopar.parallelize(cluster="local:1", **options)
