"""Habits around train() and eval() (docs/habits.md), on real ranks."""

from __future__ import annotations

from typing import Any

import torch
from support.harness.comparison import same_gradients
from support.harness.habits import (  # noqa: F401
    equals_one_process,
    of,
    one_step,
    parallel_of,
    test_habit,
    test_habit_under_other_plans,
)
from support.models.habit_model import BATCH, batch, net
from torch import nn


def draws_differ(parallel: Any, reference: nn.Module) -> None:
    """With dropout, which autopar draws from streams of its own: another number at each call, near that of one process."""
    with torch.no_grad():
        found = [float(parallel(**batch())) for _ in range(2)]
        assert found[0] != found[1] and abs(found[0] - float(reference(**batch()))) < 1.0


@of("dropout eval")
def model_in_eval_mode(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout").eval(), plan), net("dropout").eval()
    assert not parallel.training
    with torch.no_grad():
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))


@of("dropout eval")
def train_after_eval_mode(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout").eval(), plan), net("dropout").eval()
    draws_differ(parallel.train(), reference.train())
    one_step(parallel)
    with torch.no_grad():
        torch.testing.assert_close(parallel.eval()(**batch()), reference.eval()(**batch()))


@of("eval")
def train_without_dropout(plan: str) -> None:
    equals_one_process(parallel_of(net().eval(), plan).train(), net())


@of("dropout")
def eval_with_dropout(plan: str) -> None:
    parallel, reference = parallel_of(net("dropout"), plan), net("dropout")
    with torch.no_grad():
        in_training = parallel(**batch())
        for model in (parallel, reference):
            model.eval()
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
        parallel.train()
        assert abs(parallel(**batch()) - reference(**batch())) > 1e-4 < abs(in_training - reference(**batch()))


def right_in_eval(kind: str, plan: str) -> None:
    parallel, reference = parallel_of(net(kind), plan), net(kind)
    for model in (parallel, reference):
        one_step(model)
        model.eval()
    with torch.no_grad():
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
    for model in (parallel, reference):
        model.train()
        model(**batch()).backward()
    same_gradients(parallel, reference)


@of("branch")
def eval_with_branch(plan: str) -> None:
    right_in_eval("branch", plan)


@of("constant_dropout")
def eval_with_constant_dropout(plan: str) -> None:
    parallel, reference = parallel_of(net("constant_dropout"), plan), net("constant_dropout")
    draws_differ(parallel, reference)
    draws_differ(parallel.eval(), reference.eval())


@of("batch_norm")
def eval_with_batch_norm(plan: str) -> None:
    right_in_eval("batch_norm", plan)


@of("batch_norm")
def synchronized_batch_norm(plan: str) -> None:
    parallel, reference = parallel_of(nn.SyncBatchNorm.convert_sync_batchnorm(net("batch_norm")), plan), net("batch_norm")
    equals_one_process(parallel, reference)
    parallel.eval()
    torch.testing.assert_close(parallel(**batch()).detach(), reference.eval()(**batch()).detach())


def inference_mode(plan: str) -> None:
    """Before the first step, between two, and of a batch of another kind."""
    parallel, reference = parallel_of(net(), plan), net()
    for seed in range(2):
        for size in (BATCH, 6):
            with torch.inference_mode():
                given = batch(seed, size)
                torch.testing.assert_close(parallel(**given), reference(**given))
        equals_one_process(parallel, reference, 1)
        one_step(parallel, **batch(seed, 6))
        parallel.zero_grad()
