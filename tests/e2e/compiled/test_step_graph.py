"""Training steps that are captured and replayed (`cuda_graph=True`): bit-equal to steps that run, whatever a script does between
them. On CPUs a tape of operators stands in for the graph of a GPU (`kernel_tape`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from support.harness.end_to_end import Prepared, prepare, prepare_dropout
from support.harness.rank_pool import RankError, RankPool
from support.harness.training_loop import full_gradients, full_state, parallel_model
from support.kernel_tape import tapes
from support.plans.drawn_candidates import drawn_candidate
from support.plans.mesh import mesh_of
from support.plans.pipeline_plans import candidate_text, pipeline_candidate
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.ir.plan import Candidate, Pipeline, Precision
from autopar.program.build import program_text
from autopar.runtime.compat.cuda_graphs import CaptureProblem

F64 = Precision("float64", "float64")
Batch = Mapping[str, torch.Tensor]
Steps = tuple[list[float], list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Losses, the gradients before each step of the optimizer, and the state at the end."""


def candidate(prepared: Prepared, axes: dict[str, int], zero: int, micro_batches: int = 1) -> Candidate:
    return drawn_candidate(prepared.graph, mesh_of(**axes), micro_batches, zero=zero, wild=0.0, precision=F64)


def batch_of_step(batch: Batch, step: int) -> Batch:
    """Other examples in other places, of the same sizes."""
    return {name: x.roll(step, 0) * (1 + step % 2 if x.is_floating_point() else 1) for name, x in batch.items()}


def train(parallel: Any, batch: Batch, between: Callable[[Any, Any, int], None] | None = None, steps: int = 7) -> Steps:
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(steps):
        loss = parallel(**batch_of_step(batch, step))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.clone() for name, each in full_gradients(parallel).items()})
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(parallel, optimizer, step)
    return losses, gradients, full_state(parallel)


def both(text: str, state: Any, batch: Batch, compile: str, habit: str) -> tuple[Steps, Steps, int]:
    """On a rank: a training without graphs, one with, and how often the latter captured."""
    out = []
    for graph in (False, True):
        with tapes():
            parallel = parallel_model(text, state, cuda_graph=graph, check_every=0, compile=compile)
            out.append(HABITS[habit](parallel, batch) if habit else train(parallel, batch))
    return out[0], out[1], parallel.calls.first.graph.stream.captures


def accumulate(parallel: Any, batch: Batch) -> Steps:
    """Gradients of several calls add up, in tensors that zero_grad leaves now and then."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(8):
        loss = parallel(**batch_of_step(batch, step)) / 2
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: each.clone() for name, each in full_gradients(parallel).items()})
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 4 == 1)
    return losses, gradients, full_state(parallel)


def join_losses(parallel: Any, batch: Batch) -> Steps:
    """Two losses, one backward; and a loss that nobody wants."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    losses, gradients = [], []
    for step in range(4):
        first, second = (parallel(**batch_of_step(batch, 2 * step + each)) for each in range(2))
        parallel(**batch_of_step(batch, 5))
        (first + 3 * second).backward()
        losses += [first.item(), second.item()]
        gradients.append(full_gradients(parallel))
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, full_state(parallel)


def go_back_twice(parallel: Any, batch: Batch) -> Steps:
    """Two losses of one backward, and another backward of one of them."""
    losses, gradients = [], []
    for step in range(2):
        first, second = (parallel(**batch_of_step(batch, 2 * step + each)) for each in range(2))
        (first + 3 * second).backward(retain_graph=True)
        second.backward()
        losses += [first.item(), second.item()]
        gradients.append(full_gradients(parallel))
        parallel.zero_grad()
    return losses, gradients, full_state(parallel)


def evaluate_and_cut(parallel: Any, batch: Batch) -> Steps:
    """Evaluation and a smaller batch between steps."""
    losses = []

    def between(parallel: Any, optimizer: Any, step: int) -> None:
        with torch.no_grad():
            losses.append(parallel(**batch).item())
        half = {name: x[: len(x) // 2] for name, x in batch.items()}
        parallel(**half).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = train(parallel, batch, between)
    return found[0] + losses, found[1], found[2]


def freeze_and_load(parallel: Any, batch: Batch) -> Steps:
    """Parameters that end and begin to train, and weights that are loaded."""
    saved = {name: tensor.clone() for name, tensor in parallel.full_state().items()}

    def between(parallel: Any, optimizer: Any, step: int) -> None:
        name, parameter = next(iter(parallel.named_parameters()))
        if step in (2, 6):
            parameter.requires_grad_(not parameter.requires_grad)
        if step == 4:
            parallel.load_state_dict(saved)

    return train(parallel, batch, between, steps=11)


def keep_gradients(parallel: Any, batch: Batch) -> Steps:
    """Gradients of a step that somebody keeps, and those of `torch.autograd.grad`."""
    optimizer, kept = torch.optim.SGD(parallel.parameters(), lr=0.1), []
    losses, gradients = [], []
    for step in range(6):
        loss = parallel(**batch_of_step(batch, step))
        if step % 2:
            kept += torch.autograd.grad(loss, list(parallel.parameters()))
        else:
            loss.backward()
            kept += [parameter.grad for parameter in parallel.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    gradients.append({str(number): each.full_tensor() for number, each in enumerate(kept)})
    return losses, gradients, full_state(parallel)


def begin_small(parallel: Any, batch: Batch) -> Steps:
    """A first batch of another size, and losses that nobody wants before a layer is frozen."""
    parallel(**{name: x[: len(x) // 2] for name, x in batch.items()}).backward()
    parallel.zero_grad()

    def between(parallel: Any, optimizer: Any, step: int) -> None:
        if step == 4:
            parallel(**batch)
            next(parallel.parameters()).requires_grad_(False)

    return train(parallel, batch, between, steps=9)


class Interruption(TorchDispatchMode):
    """Ctrl-C at an operator."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators = operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators -= 1
        if not self.operators:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def interrupt(parallel: Any, batch: Batch, operators: Sequence[int] = (60, 150, 0, 10, 0, 60, 0, 0, 60, 150, 0)) -> Steps:
    """Steps that end in their midst, before a capture and later; the weights change then."""
    todo = iter(operators)

    def between(parallel: Any, optimizer: Any, step: int) -> None:
        if at := next(todo, 0):
            with suppress(KeyboardInterrupt), Interruption(at):
                parallel(**batch).backward()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in parallel.parameters():
                parameter.mul_(0.9)

    return train(parallel, batch, between, steps=12)


def change_weights(parallel: Any, batch: Batch) -> Steps:
    """What `interrupt` does to the weights."""
    return interrupt(parallel, batch, ())


def count_and_look(parallel: Any, batch: Batch) -> Steps:
    """A step that is measured, between others: its blocks too."""
    measurement: list[Any] = []

    def between(parallel: Any, optimizer: Any, step: int) -> None:
        if step == 3:
            measurement.append(parallel.measure(1))
        if step == 5:
            measurement[0].stop()

    losses, gradients, state = train(parallel, batch, between, steps=8)
    return [*losses, len(measurement[0].report().scalars())], gradients, state


_EACH = (
    *(accumulate, join_losses, evaluate_and_cut, freeze_and_load, keep_gradients, begin_small, count_and_look),
    *(interrupt, change_weights, go_back_twice),
)
HABITS: dict[str, Callable[[Any, Batch], Steps]] = {each.__name__: each for each in _EACH}
CASES = (
    ("mlp", {"dp": 2}, 0, 1, ""),
    ("llama", {"dp": 2}, 3, 2, ""),
    ("mlp", {"dp": 2, "tp": 2}, 1, 1, "aot_eager"),
    ("gpt2", {"tp": 2}, 0, 2, ""),
)


def check(text: str, prepared: Prepared, world: int, ranks: RankPool, compile: str = "", habit: str = "") -> set[int]:
    """The numbers of captures on ranks. One backward of two losses adds their gradients before they are reduced."""
    captures, rounding = set(), 1e-12 if habit in ("join_losses", "go_back_twice") else 0.0
    for plain, replayed, count in ranks.run(both, text, prepared.state, prepared.batch, compile, habit, world=world, timeout=300):
        assert plain[0] == replayed[0]
        for one, two in zip((*plain[1], plain[2]), (*replayed[1], replayed[2]), strict=True):
            assert one.keys() == two.keys()
            assert not [name for name in one if (one[name] - two[name]).abs().max() > rounding]
        captures.add(count)
    return captures


@pytest.mark.parametrize(("name", "axes", "zero", "micro_batches", "compile"), CASES)
def test_replays_are_bit_equal(
    name: str, axes: dict[str, int], zero: int, micro_batches: int, compile: str, ranks: RankPool
) -> None:
    prepared = prepare(name)
    plan = candidate(prepared, axes, zero, micro_batches)
    if zero == 3:
        plan = replace(plan, blocks=tuple(replace(block, recompute=True) for block in plan.blocks))
    assert check(program_text(prepared.graph, plan), prepared, prod(axes.values()), ranks, compile) == {1}


@pytest.mark.parametrize(("force", "pipeline"), [
    ({}, Pipeline(2)), ({"dp": 2, "zero": 1}, Pipeline(2, 1, "zb-h1")), ({"dp": 2, "zero": 3}, Pipeline(2, 2, "zbv")),
])  # fmt: skip
def test_pipelines_are_captured_whole(force: dict[str, int], pipeline: Pipeline, ranks: RankPool) -> None:
    """With the messages between their stages; tied embeddings lie on two of them."""
    prepared = prepare("gpt2")
    text = candidate_text(prepared, pipeline_candidate(prepared, force, pipeline, 4))
    assert check(text, prepared, 2 * force.get("dp", 1), ranks) == {1}


@pytest.mark.parametrize(("habit", "captures"), [
    ("accumulate", 1), ("join_losses", 1), ("evaluate_and_cut", 1), ("freeze_and_load", 3), ("keep_gradients", 1),
    ("begin_small", 2), ("count_and_look", 1), ("go_back_twice", 1),
])  # fmt: skip
def test_between_replays_anything_may_happen(habit: str, captures: int, ranks: RankPool) -> None:
    prepared = prepare("mlp")
    text = program_text(prepared.graph, candidate(prepared, {"dp": 2}, 1))
    assert check(text, prepared, 2, ranks, habit=habit) == {captures}


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_interruptions_leave_nothing(zero: int, ranks: RankPool) -> None:
    """With graphs and without: a step after one that was interrupted is that of the weights of then."""
    prepared = prepare("llama")
    case = program_text(prepared.graph, candidate(prepared, {"dp": 2}, zero)), prepared.state, prepared.batch, ""
    wanted = ranks.run(both, *case, "change_weights", world=2, timeout=300)[0][0]
    *interrupted, captures = ranks.run(both, *case, "interrupt", world=2, timeout=300)[0]
    assert captures
    for losses, *_ in interrupted:
        assert losses == pytest.approx(wanted[0], rel=1e-12)


def run_some(text: str, state: Any, batch: Batch, taped: bool, options: dict[str, Any]) -> None:
    """On a rank: as many steps as a capture needs, and once more where they are refused, as in a notebook."""
    if not taped:
        parallel_model(text, state, cuda_graph=True)
    with tapes():
        parallel = parallel_model(text, state, cuda_graph=True, check_every=0, **options)
        with suppress(CaptureProblem):
            train(parallel, batch, steps=3)
        train(parallel, batch, steps=1)


def refused(prepared: Prepared, text: str, world: int, ranks: RankPool, *, taped: bool = True, compile: str = "") -> str:
    with pytest.raises(RankError) as error:
        ranks.run(run_some, text, prepared.state, prepared.batch, taped, {"compile": compile}, world=world, timeout=120)
    return str(error.value).strip().splitlines()[-1]


def test_what_no_graph_replays_is_refused(ranks: RankPool) -> None:
    """Random numbers, in the forward and in the compiled one; what the host reads; devices without graphs."""
    dropout, mlp, experts = prepare_dropout(), prepare("mlp"), prepare("mixtral")
    text = program_text(dropout.graph, candidate(dropout, {"dp": 2}, 0))
    for compile in ("", "aot_eager"):
        message = refused(dropout, text, 2, ranks, compile=compile)
        assert "draws random numbers" in message and "leave it out" in message, message
    text = program_text(experts.graph, candidate(experts, {"dp": 2}, 0))
    assert "reads values on the host (tolist)" in refused(experts, text, 2, ranks)
    text = program_text(mlp.graph, candidate(mlp, {"dp": 2}, 0))
    assert "needs CUDA devices, and this process computes on cpu" in refused(mlp, text, 2, ranks, taped=False)
