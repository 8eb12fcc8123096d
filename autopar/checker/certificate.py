"""The certificate of a program: what was proven of which text, from which lemmas, and what was assumed. Start here.

`certify` goes through the text once; it knows nothing of how the text was made. The document is a function of text, graph and
plan alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.checker import conversions
from autopar.checker.block_calls import ProgramResult
from autopar.checker.memory import stage_bounds
from autopar.checker.order import ScheduleProof, Step, read_schedule, state_actions, unrolled
from autopar.checker.program import ProgramProof
from autopar.checker.shards import NotProven
from autopar.checker.text import ProgramText, read_program
from autopar.ir.graph import Graph
from autopar.ir.mesh import DATA_AXIS
from autopar.ir.plan import Candidate

FORMAT = 1
WINDOWS = 4
"""The number of windows that are played of a schedule that is never drained: each beside the one before and the one after it."""
ALWAYS = (
    "torch's operations, autograd and the collectives of the backend compute what they document",
    "the runtime adds up gradients over data ranks and micro-batches once (FSDP2, or its buckets), and losses of micro-batches",
    "the parameters that ranks hold are the shards that the program says, and every rank has its part of one batch",
    "floating-point numbers are added up in another order than on one device",
    "kernels save what torch's own do, and attention runs in one that keeps no matrix of scores (memory only)",
)
"""What every certificate rests on."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that was proven. `lemmas`: the rows and lemmas that it rests on, with the number of lines."""

    name: str
    says: str
    lemmas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is proven of one text. `refused`: the first line that is not proven, and why; then there are no claims."""

    text_sha256: str
    graph: str
    plan_sha256: str
    mesh: Mapping[str, int]
    batch: int
    claims: tuple[Claim, ...] = ()
    assumptions: tuple[tuple[int, str], ...] = ()
    bounds: tuple[int, ...] = ()
    """Bytes of one rank of each stage, at most."""
    refused: tuple[int, str] | None = None

    @property
    def holds(self) -> bool:
        return self.refused is None

    def to_json(self) -> str:
        """The document beside the program."""
        document: dict[str, Any] = {
            "format": FORMAT,
            "program": {"sha256": self.text_sha256},
            "plan": {"sha256": self.plan_sha256},
            "graph": {"fingerprint": self.graph},
            "mesh": dict(self.mesh),
            "batch": self.batch,
            "holds": self.holds,
            "refused": None if self.refused is None else {"line": self.refused[0], "reason": self.refused[1]},
            "claims": [{"claim": c.name, "says": c.says, "lemmas": dict(c.lemmas)} for c in self.claims],
            "assumptions": [*({"line": line, "says": says} for line, says in self.assumptions), *({"says": s} for s in ALWAYS)],
            "memory_bound_bytes": list(self.bounds),
        }
        return json.dumps(document, indent=1) + "\n"

    def line(self) -> str:
        """One line for people."""
        if self.refused is not None:
            return refusal(*self.refused)
        lemmas = sum(len(claim.lemmas) for claim in self.claims)
        assumed = f", {len(self.assumptions)} lines assumed" if self.assumptions else ""
        return f"proven equal to the model on {' x '.join(f'{k}={v}' for k, v in self.mesh.items())}, by {lemmas} lemmas{assumed}"


def refusal(line: int, reason: str) -> str:
    """The words for a line that is not proven."""
    return f"not proven{f' (line {line})' if line else ''}: {reason}"


@torch.inference_mode(False)
@torch.enable_grad()
def certify(
    text: str, graph: Graph, candidate: Candidate, plan_json: str | bytes = b"", optimizer: str = "adamw", first: str = ""
) -> Certificate:
    """The certificate of a program's text: of the graph that it must compute, at the batch and mesh of the plan. `first` is the
    text of the program whose weights it shares, where it is a further program for calls of another kind."""
    plan = plan_json.encode() if isinstance(plan_json, str) else plan_json
    mesh = dict(zip(candidate.mesh.names, candidate.mesh.sizes, strict=True))
    mesh = {"pp": candidate.pipeline.stages, **mesh} if candidate.pipeline.stages > 1 else mesh
    empty = Certificate(_digest(text.encode()), graph.fingerprint, _digest(plan), mesh, candidate.batch)
    try:
        proven = _proven(text, graph, candidate, first)
        bounds = tuple(each.total for each in stage_bounds(proven.proof, proven.stages, optimizer))
    except NotProven as error:
        return replace(empty, refused=(error.line, error.reason))
    result, order = proven.result, proven.order
    lemmas = Counter[str]()
    lines: list[tuple[int, str]] = list(proven.assumed)
    collectives = Counter[str]()
    for block in result.blocks.values():
        lemmas.update(block.lemmas)
        lines += sorted(block.assumptions.items())
        for each in block.collectives:
            forward, backward = conversions.COMMUNICATION["".join(conversions.letters(each.text))]
            collectives.update([f"{each.axis} {kind}" for kind in (forward, backward if each.backward else "") if kind])
    moved = {name: count for name, count in lemmas.items() if name.startswith("conversion")}
    operations = {name: count for name, count in lemmas.items() if name not in moved}
    equal = f"each of {sum(operations.values())} lines of distinct blocks is the operation that the model has there"
    order_text = "all ranks of a group meet in the same collectives of equal sizes; no message waits forever"
    claims = (
        Claim("gate", "the text calls known operations on tensors, and nothing else"),
        Claim("equal", equal, operations),
        Claim("types", "partial values are read by linear operations only; every operand is what its operation needs", moved),
        Claim("gradients", f"the gradients of {len(result.parameters)} parameters are complete exactly once on every axis"),
        Claim("random", "random numbers differ where ranks hold different elements, and agree elsewhere"),
        Claim("branches", "ranks branch on the mode and on values that are equal on all of them"),
        Claim("loss", "the loss is the model's, over the whole batch, and each rank starts its backward once"),
        Claim("order", order_text, {**collectives, **order}),
        Claim("state", f"ranks hold each of {len(result.parameters)} parameters once, under the model's names and shapes"),
    )
    return replace(empty, claims=claims, assumptions=tuple(dict.fromkeys(lines)), bounds=bounds)


@torch.inference_mode(False)
@torch.enable_grad()
def why_not_proven(text: str, graph: Graph, candidate: Candidate, first: str = "") -> str:
    """Return the first line of a program that is not proven, and why, in words; empty where all are. It takes half of the time of
    a certificate, which bounds the memory too."""
    try:
        _proven(text, graph, candidate, first)
    except NotProven as error:
        return refusal(error.line, error.reason)
    return ""


@dataclass(frozen=True, slots=True)
class _Proven:
    """A text that is proven. `stages`: the steps of each; `order`: the numbers of the schedule's proof; `assumed`: by line."""

    proof: ProgramProof
    result: ProgramResult
    stages: list[list[Step]]
    order: dict[str, int]
    assumed: list[tuple[int, str]]


def _proven(text: str, graph: Graph, candidate: Candidate, first: str) -> _Proven:
    program = read_program(text)
    proof = ProgramProof(program, graph, candidate)
    result = proof.check()
    stages = read_schedule(program.schedule, program.program.line)
    order, assumed = _order(program, proof, stages)
    if proof.examples:
        even = proof.examples["self.mesh.own_examples"]
        assumed.append((program.program.line, f"ranks have {even} examples or one less; the proof is of {even} on each"))
    if first:
        _shares_weights(program, read_program(first))
        assumed.append((program.program.line, "all ranks run this program for the same calls, which the runtime compares"))
    return _Proven(proof, result, stages, order, assumed)


def _shares_weights(program: ProgramText, first: ProgramText) -> None:
    """The weights that a further program reads lie on the ranks as the first one stores them."""
    stored = {name: each for _, name, each in first.parameters()}
    for block, name, each in program.parameters():
        known = stored.get(name)
        if known is None:
            raise NotProven(block.line, f"the first program does not hold {name}")
        for what in ("shape", "dtype", "places"):
            one, other = getattr(known, what), getattr(each, what)
            if one != other:
                raise NotProven(block.line, f"{name} is stored with {what} {other}, and by the first program with {one}")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _order(program: ProgramText, proof: ProgramProof, stages: list[list[Step]]) -> tuple[dict[str, int], list[tuple[int, str]]]:
    """The numbers of the schedule's proof, and what was assumed of it."""
    line = program.program.line
    if not program.chunks:
        if stages:
            raise NotProven(line, "a schedule without model chunks")
        return {}, []
    planned = proof.candidate.pipeline
    if len(stages) != planned.stages or program.program.flags.get("mesh_axes", {}).get("pp") != planned.stages:
        raise NotProven(line, f"the schedule has {len(stages)} stages, the plan {planned.stages}")
    versions = int(program.program.flags.get("weight_versions", 1))
    if versions > 1:
        windows = unrolled(stages, proof.micro_batches, WINDOWS)
        found = ScheduleProof(windows, len(program.chunks), proof.micro_batches * WINDOWS, line).check()
        return found, [(line, "the runtime computes each batch forward and backward with one of two versions of the weights")]
    found = ScheduleProof(stages, len(program.chunks), proof.micro_batches, line).check()
    state_actions(stages, line)
    if proof.candidate.mesh.size_of(DATA_AXIS) > 1:
        _reduced(program, stages, line)
    return found, []


def _reduced(program: ProgramText, stages: list[Any], line: int) -> None:
    """With several data ranks the gradients of each chunk are reduced, once."""
    reduced = Counter(step.chunk for steps in stages for step in steps if step.kind == "REDUCE_GRAD")
    for number in range(len(program.chunks)):
        if reduced[number] != 1:
            raise NotProven(line, f"the gradients of chunk {number} are reduced {reduced[number]} times")
