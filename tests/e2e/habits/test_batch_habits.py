"""Habits around batches (docs/habits.md), on real ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from support.harness.comparison import same_gradients
from support.harness.habits import (  # noqa: F401
    ROWS,
    cluster,
    equals_one_process,
    one_step,
    parallel_of,
    refusal,
    test_habit,
    test_habit_under_other_plans,
    under,
)
from support.harness.training_loop import full_gradients
from support.models.habit_model import BATCH, WIDTH, batch, net
from torch import nn

import autopar
from autopar.runtime.step.same_batch import FIRST_CALLS


def global_batch(plan: str) -> None:
    equals_one_process(parallel_of(net(), plan, check_batch_every=2), net(), 5)


class Small(nn.Module):
    """Leaves batch norm out for one example, and does more for many."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if x.shape[0] > 1:
            y = self.norm(y)
        if x.shape[0] % 4 == 0 and x.shape[0] >= 8:
            y = y * 2
        return self.head(y).square().mean()  # type: ignore[no-any-return]


def branch_on_the_batch_size(force: str) -> None:
    """Also uneven batches, sizes of before, and sizes of the other branch."""
    if "pp=" in force:
        return
    torch.manual_seed(0)
    plain, x = Small().double(), batch()["x"]
    parallel = autopar.parallelize(copy.deepcopy(plain), cluster(), (x,), force=force, cache=False)
    for size in (16, 8, 1, 4, 6, 8, 1, 16):
        losses = [model(x[:size]) for model in (parallel, plain)]
        torch.testing.assert_close(losses[0].detach(), losses[1].detach(), rtol=1e-9, atol=0.0)
        for loss in losses:
            loss.backward()
    same_gradients(parallel, plain)
    made, make = [], parallel.variants.make
    parallel.variants.make = lambda *call: made.append(call) or make(*call)
    for known in (False, True):  # a program of one branch does not take the place of another
        del made[:]
        for size in (2, 16, 4 if known else 2, 16):
            with torch.no_grad():
                torch.testing.assert_close(parallel(x[:size]), plain(x[:size]), rtol=1e-9, atol=0.0)
        assert not (known and made)


def different_batches(plan: str) -> str:
    parallel = parallel_of(net(), plan, check_batch_every=4)
    said = refusal(lambda: parallel(**batch(dist.get_rank())))
    for _ in range(3):
        one_step(parallel)
    assert said == refusal(lambda: parallel(**batch(dist.get_rank())))  # call 4 is one of four
    return said


def different_batches_in_evaluation(plan: str) -> str:
    """In the first evaluation, and in one after it."""
    parallel = parallel_of(net(), plan)

    def epoch(seed: int) -> None:
        parallel.train()
        for _ in range(FIRST_CALLS + 1):
            one_step(parallel)
        parallel.eval()
        with torch.no_grad():
            parallel(**batch(seed))

    first = refusal(lambda: epoch(dist.get_rank()))
    for _ in range(FIRST_CALLS):
        epoch(0)
    assert first == refusal(lambda: epoch(dist.get_rank()))
    return first


def local_parts(plan: str) -> None:
    parallel, whole = parallel_of(net(), plan), batch()
    places = list(parallel.sampler(range(BATCH), shuffle=False))
    part = {name: tensor[places] for name, tensor in whole.items()}
    loss = parallel(parallel.local_batch(**part))
    loss.backward()
    reference = net()
    expected = reference(**whole)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(parallel(parallel.local_batch(*part.values())), expected)
    for name, gradient in full_gradients(parallel).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad)


@under("tp=2,dp=1")
def different_local_parts(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    axes = {**parallel.program.mesh.axes, **parallel.program.mesh.pipeline_axes}
    part = batch(dist.get_rank(), BATCH // axes.get("dp", 1))
    if axes.get("dp") == (size := dist.get_world_size()):  # right: every rank has a part of its own
        parts = [batch(rank, BATCH // size) for rank in range(size)]
        whole = {name: torch.cat([each[name] for each in parts]) for name in part}
        torch.testing.assert_close(parallel(parallel.local_batch(**part)).detach(), net()(**whole).detach())
        return ROWS["different_local_parts"][1]
    return refusal(lambda: parallel(parallel.local_batch(**part)))


@under("dp=2,tp=1,zero=3")
def uneven_local_parts(plan: str) -> str:
    parallel = parallel_of(net(), plan)
    dp = parallel.program.mesh.dp
    if dp.size == 1:
        return ROWS["uneven_local_parts"][1]
    said = refusal(lambda: parallel(parallel.local_batch(**batch(0, 4 if dp.coordinate else 5))))
    assert "a local_batch of 4" in said and "a local_batch of 5" in said
    return said


class Counted(nn.Module):
    """Divides by a count that is passed beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().sum() / count


@under("dp=2,tp=1,zero=3")
def count_beside_local_parts(force: str) -> str:
    torch.manual_seed(0)
    plain, x = Counted(), batch()["x"]
    parallel = autopar.parallelize(copy.deepcopy(plain), cluster(), (x, torch.tensor(3)), force=force, cache=False)
    dp = parallel.program.mesh.dp
    part, own = x.chunk(dp.size)[dp.coordinate], 5 + dp.coordinate
    same = parallel(parallel.local_batch(part, torch.tensor(5)))
    torch.testing.assert_close(same.detach(), plain(x, torch.tensor(5)).detach())
    if dp.size == 1:
        return ROWS["count_beside_local_parts"][1]
    return refusal(lambda: parallel(parallel.local_batch(part, torch.tensor(own))))


def one_rank_with_a_wrong_batch(plan: str) -> str:
    parallel, wrong = parallel_of(net(), plan), batch()
    if dist.get_rank() == 1:
        wrong["x"] = wrong["x"][:, :-1]
    said = refusal(lambda: parallel(**wrong))
    assert "rank 1" in said
    one_step(parallel)
    return said


def gradient_into_an_input(plan: str) -> None:
    parallel, reference = parallel_of(net(), plan), net()
    given = [{**batch(), "x": batch()["x"].requires_grad_()} for _ in range(2)]
    if parallel.program.mesh.pp.size > 1:
        said = refusal(lambda: parallel(**given[0]))
        assert "gradients flow into the input x, which a pipeline cannot have: call it under torch.no_grad() where" in said, said
        assert said.endswith('or plan with force="pp=1"'), said
        return
    for model, each in zip((parallel, reference), given, strict=True):
        model(**each).backward()
    torch.testing.assert_close(given[0]["x"].grad, given[1]["x"].grad)
    same_gradients(parallel, reference)


def input_without_gradient(plan: str) -> None:
    given = batch()
    with torch.no_grad():
        found = parallel_of(net(), plan)(**{**given, "x": given["x"].clone().requires_grad_()})
        torch.testing.assert_close(found, net()(**given))
