"""Habits around train() and eval() (docs/habits.md), on real ranks."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from support.harness.comparison import different_numbers, same_gradients
from support.harness.habits import (  # noqa: F401
    cluster,
    equals_one_process,
    of,
    one_step,
    parallel_of,
    test_habit,
    test_habit_under_other_plans,
    warning_of,
)
from support.models.habit_model import BATCH, batch, net
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar


def draws_differ(parallel: Any, reference: nn.Module) -> None:
    """With dropout, which autopar draws from streams of its own: other numbers at each call, whose mean is near that of one
    process (within three deviations of "constant_dropout")."""
    with torch.no_grad():
        found, expected = ([float(model(**batch())) for _ in range(8)] for model in (parallel, reference))
        assert len(set(found)) == len(found) and abs(sum(found) - sum(expected)) / len(found) < 1.0


def equal_losses(make: Callable[[], Any]) -> list[list[bool]]:
    """Which calls of a script have equal losses, and so the same masks. It puts states back that it asked for."""
    model, losses, file = make(), list[float](), io.BytesIO()

    def call(count: int = 1) -> None:
        losses.extend(model(**batch()).item() for _ in range(count))

    torch.manual_seed(4)
    call()
    early = torch.get_rng_state()
    call(2)
    late = torch.random.get_rng_state()
    torch.save({"rng": late}, file)
    call(3)
    torch.set_rng_state(early)
    call(3)
    torch.random.set_rng_state(late.clone())
    model.eval()
    with torch.no_grad():
        model(**batch())
    model.train()
    call()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        call()
    loss = model(**batch())
    other = checkpoint(torch.tanh, torch.ones(3, requires_grad=True), use_reentrant=False)
    (loss + other.sum()).backward()  # puts back a state of before, and that of now again
    call(2)
    torch.manual_seed(4)
    call()
    model = make()
    torch.set_rng_state(torch.load(io.BytesIO(file.getvalue()), weights_only=True)["rng"])
    call(2)
    return [[one == other for other in losses] for one in losses]


@of("dropout")
def put_back_generator_states(plan: str) -> None:
    found = equal_losses(lambda: parallel_of(net("dropout"), plan))
    assert found == equal_losses(lambda: net("dropout"))
    assert [sum(row) for row in found] == [2, 2, 2, 4, 2, 2, 2, 2, 4, 4, 1, 2, 1, 2, 4, 2]


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


def parameters_in_inference_mode(plan: str) -> None:
    """State dicts, averages, and writes into parameters and into views of them, between steps."""
    numbers = []
    for model in (parallel_of(net(), plan), net()):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
        average = torch.optim.swa_utils.AveragedModel(model)
        for seed in range(2):
            with torch.inference_mode():
                average.update_parameters(model)
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                for parameter in model.parameters():
                    parameter.data.mul_(0.5)
                    parameter.detach()[0] += 0.1
                    parameter.chunk(2)[0].add_(0.1)
                found.append(model(**batch(seed)).item())
                model.load_state_dict(kept)
                own = (p for name, p in model.named_parameters() if name != "unused")
                found.append(sum((p.detach() ** 2).sum() for p in own).item())
            optimizer.zero_grad()
            one_step(model, **batch(seed))
            optimizer.step()
        with torch.inference_mode():
            found += [average(**batch(5)).item(), copy.deepcopy(model)(**batch(5)).item()]
        numbers.append(found)
    assert not (wrong := different_numbers("numbers", *numbers, 1e-9)), wrong


def parallelize_in_inference_mode(plan: str) -> None:
    """The model was made outside of it; a copy of the parallel model trains too."""
    model, reference = net(), net()
    with torch.inference_mode():
        parallel = parallel_of(model, plan)
        torch.testing.assert_close(parallel(**batch()), reference(**batch()))
        copied = copy.deepcopy(parallel)
    for each in (parallel, copied):
        equals_one_process(each, copy.deepcopy(reference))


class PaddedEncoder(nn.Module):
    """Takes the mean over all positions, the padded ones too."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(12, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.encoder(self.words(ids), src_key_padding_mask=ids == 0)
        return self.head(hidden.mean(1)).square().mean()  # type: ignore[no-any-return]


def eval_with_padded_encoder(force: str) -> str:
    """One process takes torch's fast path here, and has another number than in training or with gradients."""
    ids = torch.arange(32).view(8, 4) % 11 + 1
    ids[::2, 2:] = 0
    torch.manual_seed(0)
    reference = PaddedEncoder().double()
    parallel = autopar.parallelize(copy.deepcopy(reference), cluster(), {"ids": ids}, force=force or None, cache=False)
    in_training = warning_of(lambda: one_step(parallel, ids=ids))
    parallel.eval(), reference.eval()
    with_gradients = warning_of(lambda: parallel(ids=ids))
    with torch.no_grad():
        line, again = (warning_of(lambda: parallel(ids=ids)) for _ in range(2))
        fast = reference(ids)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            torch.testing.assert_close(parallel(ids=ids), reference(ids))
            assert abs(fast - reference(ids)) > 1e-3
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert not any("set_fastpath_enabled" in each for each in (in_training, with_gradients, again))
    return line
