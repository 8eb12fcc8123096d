"""An upper bound of the memory of each stage, from what the lines of the program make.

A line saves for its backward no more than its operands, its results, and something of the size of its results (a mask,
statistics, a log-sum-exp): what kernels save beyond that, and their workspaces, are assumed to be within it. Operands are results
of other lines. So the forward of a block holds at most twice what its lines make; its backward as much again, of gradients, for
one block at a time. A bound and no estimate: views and what is freed early count too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.checker.order import Step
from autopar.checker.program import ProgramProof
from autopar.checker.shards import MICRO
from autopar.checker.text import BlockText
from autopar.ir.mesh import DATA_AXIS

EXTRA = 2
"""Bytes that a line holds over those of its results."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Of all other dtypes 8."""
_MOMENTS = {"adamw": 2, "adam": 2, "sgd": 0}


@dataclass(frozen=True, slots=True)
class StageBound:
    """Bytes of one rank of a stage: state, activations of all micro-batches in flight, and what one block takes while it runs."""

    state: int
    activations: int
    working: int

    @property
    def total(self) -> int:
        return self.state + self.activations + self.working


def stage_bounds(proof: ProgramProof, stages: Sequence[Sequence[Step]], optimizer: str) -> list[StageBound]:
    """The bound of each stage. `stages` are the actions of a pipeline; none is one stage that runs all."""
    chunks = proof.text.chunks or (proof.text.program,)
    homes = {step.chunk: stage for stage, steps in enumerate(stages) for step in steps}
    out = []
    for stage in range(max(1, len(stages))):
        own = [number for number in range(len(chunks)) if homes.get(number, 0) == stage]
        state = activations = working = 0
        seen: set[str] = set()
        for number in own:
            flying = _in_flight(stages[stage], number) if stages else 1
            for block, result in proof.result.calls.get(f"{chunks[number].name}.forward", []):
                text = proof.text.blocks[block]
                whole = EXTRA * sum(size for _, size in result.lifetimes)
                activations += flying * (result.input_bytes + (0 if text.flags.get("recompute") else whole))
                working = max(working, 2 * whole)
            for instances in chunks[number].instances.values():
                for instance in instances:
                    state += _state(proof, proof.text.blocks[instance.block], instance.prefix, seen, optimizer)
        out.append(StageBound(state, activations, working))
    return out


def _in_flight(steps: Sequence[Step], chunk: int) -> int:
    """The most micro-batches whose forward has run and whose backward has not ended."""
    now = most = 0
    halves = {step.part for step in steps if step.chunk == chunk and step.kind == "W"}
    for step in steps:
        if step.chunk == chunk:
            now += (step.kind == "F") - (step.kind == "B") - (step.kind == "W" or (step.kind == "I" and step.part not in halves))
            most = max(most, now)
    return most


def _state(proof: ProgramProof, text: BlockText, prefix: str, seen: set[str], optimizer: str) -> int:
    """Parameters, gradients and optimizer state of one block, and the weights that were gathered to run it."""
    zero = int(text.flags.get("zero", 0))
    ranks = proof.candidate.zero_group or proof.candidate.mesh.size_of(DATA_AXIS)
    moments = _MOMENTS.get(optimizer, 2)
    total = 0
    for stored in text.stored:
        name = f"{prefix}.{stored.path}"
        if name in seen:
            continue
        seen.add(name)
        parts = prod(_size(proof, axis) for axis, place in stored.places.items() if place.startswith("S"))
        whole = -(-prod(stored.shape) // parts) * _BYTES.get(stored.dtype, 8)
        if not stored.trainable or stored.buffer:
            total += whole
            continue
        share = -(-whole // ranks)
        held = {0: whole * (2 + moments), 1: whole * 2 + share * (1 + moments), 2: whole + share * (2 + moments)}
        total += held.get(zero, whole * 2 + share * (2 + moments))
    return total


def _size(proof: ProgramProof, axis: str) -> int:
    sizes: Mapping[str, int] = dict(zip(proof.axes.names, proof.axes.sizes, strict=True))
    return sizes.get(axis, 1) if axis != MICRO else 1
