"""An upper bound of the tensors of each stage, from the lifetimes of the values of the text.

A block's forward is a function, whose variables live until it returns. What autograd saves of each line, and what is allocated
while it runs forward and backward, is torch's own answer on meta tensors (`local_run.observe`). In the backward of a block the
lines run in the opposite order: what a line saved is free when it has run, and the gradient of a value lives from the line that
read it last to the one that made it. Equal layers have equal footprints, so a loop costs what one of its layers does. Of a
pipeline, each stage's actions are played, with what each chunk holds of the micro-batches in flight.

The bound is of tensors: what an allocator reserves beyond, communicators and the context of the device are the plan's prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from autopar.checker.block_calls import BlockCall
from autopar.checker.blocks.block_result import BlockResult, Line
from autopar.checker.blocks.local_run import Observed, observe, storage_of
from autopar.checker.order import Step
from autopar.checker.program import ProgramProof
from autopar.checker.reader import AxisName, PlacedTensor
from autopar.checker.rows.operation_call import tensors_of
from autopar.checker.state_bytes import BYTES, StateBytes
from autopar.checker.text import BlockText
from autopar.ir.dims import shape_at


@dataclass(frozen=True, slots=True)
class StageBound:
    """Bytes of one rank of a stage: parameters, gradients and optimizer state; the batch; and the most that a step holds beside
    them: activations, gathered weights, gradients on their way, or the optimizer's temporaries."""

    state: int
    batch: int
    step: int

    @property
    def total(self) -> int:
        return self.state + self.batch + self.step


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one call of a block on a rank, its inputs and parameters not counted.

    forward: the most that its forward holds. saved: what is left after it, results included, until its backward.
    backward: the most that its backward holds, in place of `saved`. weights: gradients that wait where a backward has two halves.
    elsewhere: offloaded; on the device too while the copy of one call is under way, or that of the call before is prefetched.
    """

    forward: int
    saved: int
    backward: int
    weights: int
    inputs: int
    outputs: int
    elsewhere: int


def footprint(result: BlockResult, text: BlockText, ranks: Mapping[str, int]) -> Footprint:
    """The bytes of a block, of the lines of its proof."""
    inside = {storage_of(x.local)[0] for x in (*result.inputs, *result.parameters)}
    gathered = {id(x.local): x for x in result.parameters}  # in the compute dtype, of which the state has a copy
    for line in result.lines:
        if line.applied.op == "aten.to" and _operands(line)[0].stored:
            gathered[id(_operands(line)[0].local)] = line.results[0]
            inside.add(storage_of(line.results[0].local)[0])
    results = dict(storage_of(x.local) for x in result.outputs)
    given = sum(map(_gradient, result.inputs))
    weights = sum(map(_gradient, gathered.values() if text.flags.get("zero") else result.parameters))
    seen = list(_observed(result.lines, ranks))
    now = most = 0
    made: set[int] = set()
    held: list[dict[int, int]] = []  # what is saved after each line, for the backward to come
    kept: dict[int, int] = {}
    again: dict[int, int] = {}  # recomputed, or brought back from elsewhere
    for line, each in zip(result.lines, seen, strict=True):
        new = {k: size for k, size in (storage_of(x.local) for x in line.results) if k not in made | inside}
        most = max(most, now + max(each.forward, sum(new.values()) + each.extra))
        made |= new.keys()
        now += sum(new.values()) + each.extra
        if line.applied.recomputed:
            again |= new
            again[-len(held) - 1] = each.extra
            kept |= dict(storage_of(x.local) for x in _operands(line))
        else:
            kept |= each.saved | {-len(held) - 1: each.extra}
        held.append(dict(kept))
    away = dict(storage_of(x.local) for x in result.elsewhere)
    again |= away
    gone = (again.keys() | inside) - results.keys()

    def size(saved: Mapping[int, int]) -> int:
        return sum(bytes_ for key, bytes_ in {**results, **saved}.items() if key not in gone)

    returned = sum(results.values())
    after = returned if text.flags.get("recompute") else size(kept)
    peak = 0
    alive, added = _gradients(result)
    stored = {id(x.local) for x in (*result.parameters, *gathered.values())}
    for index in reversed(range(len(seen))):
        line, each = result.lines[index], seen[index]
        operands = {id(x.local): x for x in _operands(line)}
        own = sum(_gradient(x) for x in operands.values() if id(x.local) in stored)  # counted in `weights`
        peak = max(peak, size(held[index]) + alive[index] + max(0, each.backward - own) + added[index])
    repeated = [each.forward for each, line in zip(seen, result.lines, strict=True) if line.applied.recomputed]
    redone = sum(again.values()) + max(repeated, default=0)
    backward = peak + redone + weights + given
    if text.flags.get("recompute"):
        backward = max(backward, most + returned + sum(map(_gradient, result.outputs)))
    linear = [line for line in result.lines if line.applied.op in ("aten.linear", "ap.linear_kn")]
    waiting = dict(storage_of(_operands(line)[0].local) for line in linear)
    waits = sum(waiting.values()) + sum(_gradient(x) for line in linear for x in line.results)
    return Footprint(most, after, backward, waits, given, sum(map(_gradient, result.outputs)), sum(away.values()))


def _gradient(x: PlacedTensor) -> int:
    return x.local.numel() * x.local.element_size() if x.local.requires_grad else 0


def _operands(line: Line) -> list[PlacedTensor]:
    return list(tensors_of((*line.applied.args, line.applied.kwargs), PlacedTensor))


def _gradients(result: BlockResult) -> tuple[list[int], list[int]]:
    """For each line the bytes of gradients that live while its backward runs beside those that it makes: of its results, and of
    values of before that a later line reads; and of those that it adds to, since it reads such a value too."""
    made = {id(x.local): index for index, line in enumerate(result.lines) for x in line.results}
    read = {id(x.local): index for index, line in enumerate(result.lines) for x in _operands(line)}
    read |= {id(x.local): len(result.lines) for x in result.outputs}
    sizes = {id(x.local): _gradient(x) for line in result.lines for x in line.results}
    alive = [0] * len(result.lines)
    for key, size in sizes.items():
        for index in range(made[key], max(made[key] + 1, read.get(key, 0))):
            alive[index] += size
    added = []
    for index, line in enumerate(result.lines):
        later = {id(x.local): x for x in _operands(line) if read[id(x.local)] > index and id(x.local) in made}
        added.append(sum(map(_gradient, later.values())))
    return alive, added


def _observed(lines: Sequence[Line], ranks: Mapping[str, int]) -> Iterator[Observed]:
    for line in lines:
        name, results = line.applied.op, [x.local for x in line.results]
        operands = [x.local for x in _operands(line)]
        if name in ("ap.convert", "ap.start", "ap.convert_many", "ap.wait", "ap.moe_experts_wait"):
            # beside what it makes, a copy in the order that the collective sends or receives
            into, out = (sum(x.numel() * x.element_size() for x in side) for side in (operands, results))
            yield Observed({}, 0, out + max(into, out), into + max(into, out))
            continue
        axis = line.applied.kwargs.get("axis")
        with torch.set_grad_enabled(line.gradients):
            yield observe(line.applied, results, ranks.get(axis.name, 1) if isinstance(axis, AxisName) else 1)


def stage_bounds(proof: ProgramProof, stages: Sequence[Sequence[Step]], optimizer: str) -> list[StageBound]:
    """The bound of each stage. `stages` are the actions of a pipeline; none is one stage that runs all."""
    chunks = proof.text.chunks or (proof.text.program,)
    homes = {step.chunk: stage for stage, steps in enumerate(stages) for step in steps}
    sizes = dict(zip(proof.axes.names, proof.axes.sizes, strict=True))
    found: dict[int, Footprint] = {}

    def of(call: BlockCall) -> Footprint:
        key = id(call.proof)
        if key not in found:
            found[key] = footprint(call.proof, proof.text.blocks[call.block], sizes)
        return found[key]

    held = [_Chunk.of(proof.blocks.result.calls.get(f"{chunk.name}.forward", []), of) for chunk in chunks]
    counted = _Chunk.of(proof.blocks.result.calls.get(f"{proof.text.program.name}.count", []), of)
    batch = sum(prod(shape_at(x.shape, proof.candidate.batch)) * BYTES.get(x.dtype, 8) for x in proof.graph.inputs)
    out = []
    for stage in range(max(1, len(stages))):
        own = [number for number in range(len(chunks)) if homes.get(number, 0) == stage]
        steps = stages[stage] if stages else [Step(0, "F", 0), Step(0, "B", 0)]
        state = StateBytes.of(proof, [chunks[number] for number in own], optimizer)
        most = max(_play(steps, held), counted.forward)
        # each rank has the whole batch as the user passes it, and its own part
        out.append(StageBound(state.stored, 2 * batch, max(most + state.moving, state.update)))
    return out


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The footprints of all calls of a chunk: the most in its forward, what it keeps, the most in its backward in place of that,
    and what waits for the second half of a backward; with its inputs and results and their gradients, which are messages."""

    forward: int
    saved: int
    backward: int
    weights: int

    @staticmethod
    def of(calls: Sequence[BlockCall], footprint_of: Callable[[BlockCall], Footprint]) -> _Chunk:
        sizes = list(map(footprint_of, calls))
        made = {name: index for index, call in enumerate(calls) for name in call.outputs}
        read = {name: index for index, call in enumerate(calls) for name in call.inputs}
        values = {name: x for call in calls for name, x in zip(call.inputs, call.proof.inputs, strict=True)}
        outside = sum(x.local.numel() * x.local.element_size() for name, x in values.items() if name not in made)
        sent = 2 * (outside + sum(_gradient(x) for name, x in values.items() if name not in made))
        sent += 2 * sizes[-1].outputs if sizes else 0
        copied = max((each.elsewhere for each in sizes), default=0)
        kept = forward = backward = 0
        for each in sizes:
            forward = max(forward, kept + each.forward)
            kept += each.saved
        below = 0
        for index, (call, each) in enumerate(zip(calls, sizes, strict=True)):
            over = {name: _gradient(x) for name, x in values.items()
                    if read[name] > index > made.get(name, -1) and name not in call.outputs}  # fmt: skip
            backward = max(backward, below + each.backward + sum(over.values()))
            below += each.saved
        weights = sum(each.weights for each in sizes)
        return _Chunk(forward + sent + copied, kept + sent, backward + sent + copied, weights + sent)


def _play(steps: Sequence[Step], chunks: Sequence[_Chunk]) -> int:
    """The most that a stage's actions hold."""
    flying = Counter[int]()
    waiting = Counter[int]()
    halves = {(step.chunk, step.part) for step in steps if step.kind == "W"}
    most = 0
    for step in steps:
        if step.kind not in ("F", "B", "I", "W"):
            continue
        held = sum(n * chunks[c].saved for c, n in flying.items()) + sum(n * chunks[c].weights for c, n in waiting.items())
        own = chunks[step.chunk]
        if step.kind == "F":
            most = max(most, held + own.forward)
            flying[step.chunk] += 1
        elif step.kind == "W":
            most = max(most, held + own.backward - own.saved)
            waiting[step.chunk] -= 1
        else:
            most = max(most, held + own.backward - own.saved)
            flying[step.chunk] -= 1
            waiting[step.chunk] += (step.chunk, step.part) in halves
    return most
