"""Habits around the model's faces: attributes, copies, logs (docs/habits.md), on real ranks."""

from __future__ import annotations

import copy
import gc
import logging
import random
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import different_numbers
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.harness.training_loop import adamw, train
from support.models.habit_model import WIDTH, batch, net
from torch import nn

import autopar


def read_the_plan(plan: str) -> None:
    assert parallel_of(net(), plan).plan == autopar.Plan.from_json(Path(plan).read_text())


@of("dropout")
def draw_random_numbers(plan: str) -> None:
    model = net("dropout")
    torch.manual_seed(3 + dist.get_rank())
    random.seed(3)
    before = (torch.default_generator.get_state(), random.getstate())
    parallel = parallel_of(model, plan)
    one_step(parallel)
    assert torch.equal(torch.default_generator.get_state(), before[0]) and random.getstate() == before[1]


def module_of_ddp(plan: str) -> str:
    return refusal(lambda: parallel_of(net(), plan).module.state_dict())


def unwrap_if_wrapped(plan: str) -> None:
    """As scripts do that run with and without DistributedDataParallel."""
    parallel = parallel_of(net(), plan)
    assert (parallel.module if hasattr(parallel, "module") else parallel) is parallel
    assert getattr(parallel, "module", parallel) is parallel


def generate_without_method(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    return refusal(lambda: parallel.generate(batch()["ids"]))


def read_attributes(plan: str) -> None:
    parallel, model = parallel_of(net(), plan), net()
    assert parallel.config == model.config and parallel.config.width == WIDTH
    assert parallel.parameter_count() == model.parameter_count()
    with pytest.raises(AttributeError, match="has an attribute 'nothing'"):
        parallel.nothing  # noqa: B018
    assert parallel.head.weight is parallel.words.weight and parallel.head.in_features == model.head.in_features
    for name, parameter in model.named_parameters():
        if name == "unused":
            continue
        *path, leaf = name.split(".")
        mine = getattr(parallel.get_submodule(".".join(path)), leaf)
        assert (mine.shape, mine.dim(), mine.dtype) == (parameter.shape, parameter.dim(), parameter.dtype)
        assert mine.numel() == parameter.numel() and len(mine) == len(parameter)
        if name not in dict(parallel.named_parameters()):
            assert f"{name} is on stage" in refusal(lambda each=mine: each.sum())  # type: ignore[misc]


def free_the_plain_model(plan: str) -> None:
    model = net()
    parallel, seen = parallel_of(model, plan), weakref.ref(model.words.weight)
    del model
    gc.collect()
    assert seen() is None
    equals_one_process(parallel, net())


def copy_the_model(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    train(parallel, [batch()], adamw())
    other = copy.deepcopy(parallel)
    train(reference, [batch()], adamw())
    before = parallel.full_state()
    equals_one_process(other, reference)
    for name, tensor in parallel.full_state().items():
        assert torch.equal(tensor, before[name])


class Agent:
    """Holds a model and its optimizer, and one of its parameters."""

    def __init__(self, model: nn.Module, first: str) -> None:
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        parts = {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2)}
        parts["words"], parts["encoder"] = next(model.parameters()), model.layers  # type: ignore[assignment]
        vars(self).update({first: parts.pop(first), **parts})

    def learn(self, seed: int) -> float:
        self.optimizer.zero_grad()
        loss = self.model(**batch(seed))
        loss.backward()
        self.optimizer.step(), self.schedule.step()
        return float(loss)


def copy_with_the_optimizer(plan: str) -> None:
    for first in ("model", "optimizer", "words"):
        losses = []
        for model in (parallel_of(net(), plan), net()):
            agent = Agent(model, first)
            found = [agent.learn(seed) for seed in range(2)]
            copied = copy.deepcopy(agent)
            found += [each.learn(seed) for seed in range(2, 5) for each in (copied, agent)]
            found += [each.model(**batch(9)).item() for each in (copied, agent)]
            assert copied.words is next(copied.model.parameters()) and copied.encoder is copied.model.layers
            losses.append(found)
        assert not (wrong := different_numbers(first, *losses, 1e-9)), wrong


def two_models(plan: str) -> None:
    """Trained in turns; one of them goes, and the other goes on."""
    first, second = parallel_of(net(), plan), parallel_of(net(), plan)
    equals_one_process(first, net(), 2)
    equals_one_process(second, net(), 2)
    assert first.heartbeat is None or first.heartbeat is not second.heartbeat
    del first
    gc.collect()
    one_step(second)


def one_layer_in_two_models(plan: str) -> str:
    model, other = net(), net()
    first = parallel_of(model, plan)
    second = parallel_of(model, plan)  # another plan of it: no warning
    other.layers[0] = model.layers[0]
    said = warning_of(lambda: autopar.parallelize(other, cluster(), batch(), plan=plan))
    del first, second
    return said if dist.get_rank() == 0 else ROWS["one_layer_in_two_models"][1]


def log_lines(plan: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        parallel_of(net(), plan)
        given = list(said)
        parallel_of(net(), None)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    if dist.get_rank():
        assert said == []
    else:
        assert len(given) == 1 and cluster() in given[0] and given[0].startswith("Net on ")
        assert said[1].startswith(f"planning Net for {cluster()}") and said[-1].startswith("Net on ") and "\n" not in said[-1]


def profile_a_step(plan: str) -> None:
    parallel = parallel_of(net(), plan)
    one_step(parallel)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        one_step(parallel)
    names: list[list[str]] = [[] for _ in range(4)]
    dist.all_gather_object(names, [event.name for event in profile.events()])
    found = {name for each in names for name in each}
    assert {"layers.0", "layers.1"} <= found
