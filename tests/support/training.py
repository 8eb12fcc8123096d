"""Training loops of every sort as data: the same words are played on one process and on the ranks of a pipeline.

| word | |
|---|---|
| ``("zero", to_none)`` | ``optimizer.zero_grad(set_to_none=to_none)`` |
| ``("loss", key, index, factor)`` | ``losses[key] = model(**batches[index]) * factor``, whose number is noted |
| ``("backward", key)`` | ``losses.pop(key).backward()`` |
| ``("gradients",)`` | notes all gradients |
| ``("clip", norm, kind)`` | ``clip_grad_norm_``, whose result is noted |
| ``("step",)`` | ``optimizer.step()`` |
| ``("look", index)`` | notes the loss without gradients |
| ``("train", mode)`` | ``model.train(mode)`` |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from support.lift import LiftedCasts
from support.models import make
from support.ranks import Ranks
from torch import Tensor, nn

Words = Sequence[tuple[Any, ...]]
Batch = dict[str, Tensor]
Told = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]
"""Numbers that were noted, gradients that were noted, and the state at the end."""

STEP: Words = (("zero", True), ("loss", 0, 0, 1.0), ("backward", 0), ("gradients",), ("step",))


def steps(count: int, first: int = 0) -> Words:
    """Plain ones, each on a batch of its own."""
    return [word if word[0] != "loss" else ("loss", 0, first + index, 1.0) for index in range(count) for word in STEP]


def play(
    model: nn.Module, words: Words, batches: Sequence[Batch], gradients: Callable[[], dict[str, Tensor]],
    clip: Callable[[float, float], Tensor], rate: float = 1e-2,
) -> tuple[list[float], list[dict[str, Tensor]]]:  # fmt: skip
    """Numbers and gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    losses: dict[Any, Tensor] = {}
    numbers: list[float] = []
    noted: list[dict[str, Tensor]] = []
    for word, *given in words:
        if word == "zero":
            optimizer.zero_grad(set_to_none=given[0])
        elif word == "loss":
            losses[given[0]] = _loss(model(**batches[given[1]])) * given[2]
            numbers.append(losses[given[0]].item())
        elif word == "backward":
            losses.pop(given[0]).backward()
        elif word == "gradients":
            noted.append({name: gradient.clone() for name, gradient in gradients().items()})
        elif word == "clip":
            numbers.append(clip(*given).item())
        elif word == "step":
            optimizer.step()
        elif word == "look":
            with torch.no_grad():
                numbers.append(_loss(model(**batches[given[0]])).item())
        else:
            assert word == "train", word
            model.train(*given)
    return numbers, noted


def _loss(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss  # type: ignore[no-any-return]


def alone(model: nn.Module, words: Words, batches: Sequence[Batch]) -> Told:
    """On one process."""

    def gradients() -> dict[str, Tensor]:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def clip(norm: float, kind: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), norm, kind)

    numbers, noted = play(model, words, batches, gradients, clip)
    state = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return numbers, noted, state


def on_ranks(jobs: Sequence[tuple[str, dict[str, Tensor], Words, Sequence[Batch], dict[str, Any]]]) -> list[Told]:
    """On a rank: each job's words, as (text, state, words, batches, options of `Parallel`)."""
    from autopar.program.build import load
    from autopar.runtime.mesh import MeshHandle
    from autopar.runtime.parallel import Parallel

    out = []
    for text, state, words, batches, options in jobs:
        made: Any = load(text).Program
        parallel = Parallel(made(MeshHandle(made.mesh_axes)), state, **options)
        numbers, noted = play(parallel, words, batches, parallel.full_gradients, parallel.clip_grad_norm_)
        out.append((numbers, noted, parallel.full_state()))
    return out


def apart(found: Told, expected: Told, tolerance: float = 1e-9) -> list[str]:
    """What differs by more than `tolerance`, relative to each tensor's largest value (gradients: and to a thousandth of the
    largest of all)."""
    out = [f"number {index}: {mine} instead of {theirs}"
           for index, (mine, theirs) in enumerate(zip(found[0], expected[0], strict=True))
           if not abs(mine - theirs) <= tolerance * abs(theirs)]  # fmt: skip
    tables = [(f"gradient {index}", *pair) for index, pair in enumerate(zip(found[1], expected[1], strict=True))]
    wanted = {name: tensor for name, tensor in expected[2].items() if name in found[2]}
    out += [] if wanted.keys() == found[2].keys() else [f"state of {sorted(found[2].keys() - wanted.keys())} is not there"]
    for kind, mine, theirs in (*tables, ("state", found[2], wanted)):
        if mine.keys() != theirs.keys():
            out.append(f"{kind} of {sorted(mine.keys() ^ theirs.keys())} on one side only")
            continue
        floor = 1e-3 * max((float(tensor.abs().max()) for tensor in theirs.values() if tensor.numel()), default=0.0)
        for name, tensor in theirs.items():
            scale = max(float(tensor.abs().max()), floor if kind != "state" else 0.0, 1e-12)
            error = float((mine[name].double() - tensor.double()).abs().max()) / scale
            if not error <= tolerance:
                out.append(f"{kind} {name} off by {error:.2g}")
    return out


class Job(NamedTuple):
    """A program, what it is to do, and what one process makes of it."""

    name: str
    text: str
    state: dict[str, Tensor]
    loop: Words
    batches: list[Batch]
    expected: Told
    options: dict[str, Any] = {}


def batches(batch: Batch, count: int = 4) -> list[Batch]:
    """All different."""
    return [{name: tensor.roll(step, 0).roll(step, -1) for name, tensor in batch.items()} for step in range(count)]


@cache
def three(name: str) -> Told:
    """What one process makes of three steps."""
    model, batch = make(name, torch.float64, 16)
    with LiftedCasts():
        return alone(model, steps(3), batches(batch))


def check(jobs: list[Job], ranks: Ranks, world: int, tolerance: float = 1e-9) -> None:
    """All on one pool of processes."""
    told = ranks.run(on_ranks, [(job.text, job.state, job.loop, job.batches, job.options) for job in jobs], world=world,
                     timeout=60.0 + 10 * len(jobs))  # fmt: skip
    wrong = [f"{job.name}, rank {rank}: {text}" for rank, mine in enumerate(told)
             for job, found in zip(jobs, mine, strict=True) for text in apart(found, job.expected, tolerance)]  # fmt: skip
    assert not wrong, "\n".join(wrong[:20])
