"""The backward in halves: what I leaves W computes, whatever stands between the parameter and the product."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.endtoend import differences, reference
from support.ranks import Ranks
from support.staged import all_forward, batch, built, model, text, trained, with_messages
from torch.utils.checkpoint import checkpoint

from autopar.program.build import load
from autopar.runtime.again import Again
from autopar.runtime.functions import linear_kn
from autopar.runtime.host import Host
from autopar.runtime.later import Later, Queue
from autopar.runtime.mesh import MeshHandle
from autopar.runtime.parallel import Parallel


class Layer(torch.nn.Module):
    """Two products with an activation between them; `later` may be without a queue."""

    def __init__(self, later: Later, dtype: torch.dtype, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.later, self.dtype, self.again = later, dtype, again
        self.up, self.bias = torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(6))
        self.down = torch.nn.Parameter(torch.randn(6, 4))
        self.frozen = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with Again(Host(torch.device("cpu"))) as again:
            x = x.to(self.dtype)
            weights = self.up.to(self.dtype), self.bias.to(self.dtype)
            h = again(self.later.linear, x, *weights) if self.again else self.later.linear(x, *weights)
            h = again(torch.tanh, h) if self.again else h.tanh()
            h = self.later.linear_kn(h, self.down.to(self.dtype).clone())
            return self.later.linear(h, self.frozen.to(self.dtype))


def run(module: Layer, x: torch.Tensor, recompute: bool) -> None:
    forward = partial(checkpoint, module, use_reentrant=False) if recompute else module
    forward(x).float().square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("recompute", "again"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("follows", [True, False])
def test_halves_are_the_whole(dtype: torch.dtype, recompute: bool, again: bool, follows: bool) -> None:
    queue = Queue()
    plain, split = Layer(Later(), dtype, again), Layer(queue.of(object()), dtype, again)
    torch.manual_seed(1)
    x = torch.randn(2, 3, 4)
    ours, theirs = x.clone().requires_grad_(follows), x.clone().requires_grad_(follows)
    run(plain, theirs, recompute)
    queue.micro_batch = 7
    run(split, ours, recompute)
    assert all(parameter.grad is None for parameter in split.parameters())
    done: list[object] = []
    queue.drain(7, done.append)
    assert len(done) == 1 and not queue.waiting
    for mine, other in zip((ours, *split.parameters()), (theirs, *plain.parameters()), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if mine.grad is not None and other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=0.0, atol=0.0)


def test_a_whole_backward_is_torchs_own() -> None:
    """Outside of halves nothing is queued, and the graph is that of F.linear."""
    queue = Queue()
    later = queue.of(object())
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5)
    assert "Addmm" in str(later.linear(x, weight, bias).grad_fn)
    queue.micro_batch = 0
    assert "Linear" in str(later.linear(x, weight, bias).grad_fn)
    with torch.no_grad():
        assert torch.equal(later.linear(x, weight, bias), F.linear(x, weight, bias))
        assert torch.equal(later.linear_kn(x, weight.t(), bias), linear_kn(x, weight.t(), bias))


def test_micro_batches_wait_apart_and_add_up() -> None:
    queue = Queue()
    later, weight = queue.of("block"), torch.randn(5, 4, requires_grad=True)
    xs = torch.randn(3, 2, 4)
    for number, x in enumerate(xs):
        queue.micro_batch = number
        later.linear(x, weight).sum().backward()
    assert weight.grad is None and sorted(queue.waiting) == [0, 1, 2]
    for number in (1, 0, 2):
        queue.drain(number, lambda block: None)
    expected = torch.ones(6, 5).t() @ xs.flatten(0, 1)
    torch.testing.assert_close(weight.grad, expected)


def made(program: str, state: dict[str, torch.Tensor], **options: Any) -> Parallel:
    module = load(program).Program
    return Parallel(module(MeshHandle(module.mesh_axes)), state, **options)


def waiting(program: str, state: dict[str, torch.Tensor]) -> list[tuple[str, int]]:
    """What each W of a step finds."""
    parallel, found = made(program, state), []
    assert parallel.stages is not None
    reductions = parallel.stages.executor.reductions
    weights = reductions.weights

    def look(chunk: int, micro_batch: int, last: bool) -> None:
        queue = next(each for each in parallel.program.mine if each.position == chunk).queue  # type: ignore[attr-defined]
        found.append((f"{chunk}W{micro_batch}", sum(map(len, queue.waiting[micro_batch].values()))))
        weights(chunk, micro_batch, last)

    reductions.weights = look  # type: ignore[method-assign]
    parallel(**batch()).backward()
    return found


def test_each_product_waits(ranks: Ranks) -> None:
    """Four in a layer, and the head."""
    program = text(all_forward(((0,), (1,)), 2, split=True), 2)
    found = ranks.run(waiting, program, model().state_dict(), world=2)
    assert found == [[("0W0", 8), ("0W1", 8)], [("1W0", 9), ("1W1", 9)]]


MIXED = with_messages(("0F0 0F1 0F2 0F3 0I0 0B1 0W0 0I2 0I3 0W3 0W2", "1F0 1F1 1F2 1F3 1I0 1B1 1I2 1W2 1W0 1B3"))
"""Whole backwards amid halves."""


def test_half_precision_adds_up_in_the_master_dtype(ranks: Ranks) -> None:
    """Halves equal whole backwards, whose sums tests elsewhere compare with those of one process."""
    cases, state = [], model().state_dict()
    for zero in (0, 1, 2, 3):
        for lines in (built("gpipe", 2, 4), MIXED):
            program = text(lines, 4, zero=zero, dp=2, compute="bfloat16", master="float32")
            cases.append((program, {name: tensor.float() for name, tensor in state.items()}, batch()))
    for answers in ranks.run(trained, cases, steps=1):
        outcomes = [outcome for outcome, _ in answers]
        assert {gradient.dtype for outcome in outcomes for gradient in outcome[1].values()} == {torch.float32}
        for whole, halves in zip(outcomes[::2], outcomes[1::2], strict=True):
            assert not differences(halves, whole, 1e-5, parameters=False)


def compiled(cases: list[tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]]) -> tuple[Any, list[str]]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = trained(cases, "aot_eager", steps=2)
    return outcomes, [str(each.message) for each in caught if "is not split" in str(each.message)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("case", [pytest.param({"dp": 2, "zero": 3}), pytest.param({"tp": 2}, marks=SLOW)], ids=str)
def test_compiled(case: dict[str, int], ranks: Ranks) -> None:
    loss, gradients, *_ = reference(model(), batch(), False)
    for outcomes, warned in ranks.run(compiled, [(text(MIXED, 4, **case), model().state_dict(), batch())], timeout=300):
        ((found, theirs, *_), _) = outcomes[0]
        bad = differences((found, theirs, {}, {}), (loss, gradients, {}, {}), 1e-9, parameters=False)
        assert not bad, bad[:4]
        assert all("Head is not split" in line for line in warned)  # its weight is cut on tp by compiled code


def test_compiled_casts_are_not_split_and_say_so(ranks: Ranks) -> None:
    state = model().state_dict()
    cast = text(MIXED, 4, dp=2, compute="bfloat16", master="float32")
    half = {name: tensor.float() for name, tensor in state.items()}
    found = ranks.run(compiled, [(cast, half, batch())], timeout=300)
    assert all(any("Layer is not split" in line for line in warned) for _, warned in found)
