"""The backward in halves: what I leaves W computes, whatever stands between the parameter and the product."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.harness.comparison import differences
from support.harness.end_to_end import reference
from support.harness.rank_pool import RankPool
from support.harness.run_program import train_pipelines
from support.harness.training_loop import parallel_model
from support.models.handwritten_pipeline import batch, built_schedule, gpipe_schedule, model, pipeline_text, with_messages
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.runtime.device.offload import HostMemory
from autopar.runtime.ops.functions import linear_kn
from autopar.runtime.ops.split_backward import SplitBackward, WeightGradQueue
from autopar.runtime.parallel import Parallel
from autopar.runtime.step.recompute import Recompute


class Layer(torch.nn.Module):
    """Two products with an activation between them; `split_backward` may be without a queue."""

    def __init__(self, split_backward: SplitBackward, dtype: torch.dtype, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.split_backward, self.dtype, self.recompute = split_backward, dtype, recompute
        self.up, self.bias = torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(6))
        self.down = torch.nn.Parameter(torch.randn(6, 4))
        self.frozen = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Recompute(HostMemory(torch.device("cpu"))) as run:
            x = x.to(self.dtype)
            weights = self.up.to(self.dtype), self.bias.to(self.dtype)
            h = run(self.split_backward.linear, x, *weights) if self.recompute else self.split_backward.linear(x, *weights)
            h = run(torch.tanh, h) if self.recompute else h.tanh()
            h = self.split_backward.linear_kn(h, self.down.to(self.dtype).clone())
            return self.split_backward.linear(h, self.frozen.to(self.dtype))


def run(module: Layer, x: torch.Tensor, checkpointed: bool) -> None:
    forward = partial(checkpoint, module, use_reentrant=False) if checkpointed else module
    forward(x).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("checkpointed", "recompute"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("follows", [True, False])
def test_halves_are_the_whole(dtype: torch.dtype, checkpointed: bool, recompute: bool, follows: bool) -> None:
    queue = WeightGradQueue()
    plain, split = Layer(SplitBackward(), dtype, recompute), Layer(queue.for_block(object()), dtype, recompute)
    torch.manual_seed(1)
    x = torch.randn(2, 3, 4)
    ours, theirs = x.clone().requires_grad_(follows), x.clone().requires_grad_(follows)
    run(plain, theirs, checkpointed)
    queue.micro_batch = 7
    run(split, ours, checkpointed)
    assert all(parameter.grad is None for parameter in split.parameters())
    done: list[object] = []
    queue.compute(7, done.append)
    assert len(done) == 1 and not queue.pending
    for mine, other in zip((ours, *split.parameters()), (theirs, *plain.parameters()), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=0.0, atol=0.0)


def test_a_whole_backward_is_torchs_own() -> None:
    """Outside of halves nothing is queued, and the graph is that of F.linear."""
    queue = WeightGradQueue()
    split = queue.for_block(object())
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5)
    assert "Addmm" in str(split.linear(x, weight, bias).grad_fn)
    queue.micro_batch = 0
    assert "Linear" in str(split.linear(x, weight, bias).grad_fn)
    with torch.no_grad():
        assert torch.equal(split.linear(x, weight, bias), F.linear(x, weight, bias))
        assert torch.equal(split.linear_kn(x, weight.t(), bias), linear_kn(x, weight.t(), bias))


def test_micro_batches_wait_apart_and_add_up() -> None:
    queue = WeightGradQueue()
    split, weight = queue.for_block("block"), torch.randn(5, 4, requires_grad=True)
    xs = torch.randn(3, 2, 4)
    for number, x in enumerate(xs):
        queue.micro_batch = number
        split.linear(x, weight).sum().backward()
    assert weight.grad is None and sorted(queue.pending) == [0, 1, 2]
    for number in (1, 0, 2):
        queue.compute(number, lambda block: None)
    expected = torch.ones(6, 5).t() @ xs.flatten(0, 1)
    torch.testing.assert_close(weight.grad, expected)


def made(program: str, state: dict[str, torch.Tensor], **options: Any) -> Parallel:
    return parallel_model(program, state, **options)


def waiting(program: str, state: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    """What each W of a step finds."""
    parallel, found = made(program, state), []
    assert parallel.pipeline_step is not None
    for position, reductions in parallel.pipeline_step.executor.reductions.chunks.items():

        def look(micro_batch: int, last: bool, position: int = position, reductions: Any = reductions) -> None:
            waiting = reductions.chunk.weight_grads.pending[micro_batch]
            found.append((f"{position}W{micro_batch}", sum(map(len, waiting.values()))))
            type(reductions).backward_weights(reductions, micro_batch, last)

        reductions.backward_weights = look  # type: ignore[method-assign]
    parallel(**batch()).backward()
    return found


def test_each_product_waits(ranks: RankPool) -> None:
    """Four in a layer, and the head."""
    program = pipeline_text(gpipe_schedule(((0,), (1,)), 2, split=True), 2)
    found = ranks.run(waiting, program, model().state_dict(), world=2)
    assert found == [[("0W0", 8), ("0W1", 8)], [("1W0", 9), ("1W1", 9)]]


MIXED = with_messages(("0F0 0F1 0F2 0F3 0I0 0B1 0W0 0I2 0I3 0W3 0W2", "1F0 1F1 1F2 1F3 1I0 1B1 1I2 1W2 1W0 1B3"))
"""Whole backwards amid halves."""


def test_half_precision_adds_up_in_the_master_dtype(ranks: RankPool) -> None:
    """Halves equal whole backwards, whose sums tests elsewhere compare with those of one process."""
    cases, state = [], model().state_dict()
    for zero in (0, 1, 2, 3):
        for lines in (built_schedule("gpipe", 2, 4), MIXED):
            program = pipeline_text(lines, 4, zero=zero, dp=2, compute="bfloat16", master="float32")
            cases.append((program, {name: tensor.float() for name, tensor in state.items()}, batch()))
    for answers in ranks.run(train_pipelines, cases, steps=1):
        outcomes = [outcome for outcome, _ in answers]
        assert {gradient.dtype for outcome in outcomes for gradient in outcome[1].values()} == {torch.float32}
        for whole, halves in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert not differences(halves, whole, 1e-5, parameters=False)


def compiled(cases: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = train_pipelines(cases, steps=2, compile="aot_eager")
    return outcomes, [str(each.message) for each in caught if "is not split" in str(each.message)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param({"dp": 2, "zero": 3}), pytest.param({"tp": 2}, marks=SLOW)], ids=str)
def test_compiled(case: dict[str, int], ranks: RankPool) -> None:
    loss, gradients, *_ = reference(model(), batch(), False)
    for outcomes, warned in ranks.run(compiled, [(pipeline_text(MIXED, 4, **case), model().state_dict(), batch())], timeout=300):
        ((found, theirs, *_), _) = outcomes[0]
        bad = differences((found, theirs, {}, {}), (loss, gradients, {}, {}), 1e-9, parameters=False)
        assert not bad, bad[:4]
        assert all("Head is not split" in line for line in warned)  # its weight is cut on tp by compiled code


def test_compiled_casts_are_not_split_and_say_so(ranks: RankPool) -> None:
    state = model().state_dict()
    cast = pipeline_text(MIXED, 4, compute="bfloat16", master="float32")
    half = {name: tensor.float() for name, tensor in state.items()}
    found = ranks.run(compiled, [(cast, half, batch())], world=2, timeout=300)
    assert all(any("Layer is not split" in line for line in warned) for _, warned in found)


def autocast_and_compiled() -> None:
    """Compiled code casts weights and biases together there, and hands them on through a Function of its own."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)]
    plain, x, y = torch.nn.Sequential(*layers, torch.nn.Linear(8, 4)), torch.randn(8, 8), torch.arange(8) % 4
    with torch.autocast("cpu", torch.bfloat16):
        parallel = autopar.parallelize(
            copy.deepcopy(plain), "local:2", (x, y), force="pp=2,dp=1,micro=2,schedule=zb-h1", cache=False, compile="aot_eager",
            loss_fn=F.cross_entropy,
        )  # fmt: skip
        for loss in (parallel(x, y), F.cross_entropy(plain(x), y)):
            loss.backward()
    for found, expected in zip(parallel.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad.full_tensor(), expected.grad, rtol=0.1, atol=0.02)  # type: ignore[attr-defined]


def test_compiled_casts_of_weights_and_biases(ranks: RankPool) -> None:
    ranks.run(autocast_and_compiled, world=2, timeout=300)
