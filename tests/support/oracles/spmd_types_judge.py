"""Somebody else's judge: generated programs under the type checker of Meta's ``spmd_types``, on a fake process group.

Their local types are ours on each axis (V is a tensor that is cut), so a program becomes one of theirs where each conversion is
called by their name for it, and each line is followed by an annotation: the type that `autopar.checker` derived of its result.
Their checker infers the type by itself, and the two must agree. What it cannot know is said in `Judgement`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.checker.program import ProgramProof
from autopar.checker.shards import MICRO, Cut, Kind
from autopar.checker.text import read_program
from autopar.dryrun.compat import fake_group
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.program.load import load_program
from autopar.runtime import collectives
from autopar.runtime.device.mesh import MeshHandle

JUDGED = ("linear_kn", "cross_entropy_sum", "count_valid")
"""Functions of our runtime that are plain operations of torch; all others they have no rule for."""


class Disagreement(Exception):
    """A line of which the two checkers derive different types."""


@dataclass
class Judgement:
    """How many results of lines, on each axis: `agreed`; `sums` are cut for them and partial for us (their local types have no
    dimensions, and leave to the author which product of two cut operands is a sum); `numbers` are equal for them, and parts of
    tensors of equal numbers for us; `taken` are from our derivation, of functions that they have no rule for. `conversions` are
    collectives and changes of type that they checked."""

    counts: Counter[str] = field(default_factory=Counter)
    conversions: Counter[str] = field(default_factory=Counter)


def annotated(text: str, lines: Mapping[int, Any]) -> str:
    """The text with the annotation of each line after it."""
    tree = ast.parse(text)

    class Annotate(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802
            if node.lineno not in lines or not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
                return node
            names = [each.id for each in getattr(node.targets[0], "elts", [node.targets[0]])]
            return [node, *ast.parse(f"_typed({node.lineno}, ({', '.join(names)},))").body]

    return ast.unparse(ast.fix_missing_locations(Annotate().visit(tree)))


def judge(text: str, graph: Graph, candidate: Candidate, change: tuple[str, str] = ("", "")) -> Judgement:
    """Run the program of one rank under their checker. SpmdTypeError (theirs) or `Disagreement` where it is refused. `change`: of
    the annotated text, after which it must be refused."""
    proof = ProgramProof(read_program(text), graph, candidate)
    result = proof.check()
    kinds: dict[int, list[tuple[dict[str, Kind], ...]]] = {}
    for block in result.blocks.values():
        for line in block.lines:
            own = tuple(dict(zip(proof.axes.names, each.kinds, strict=True)) for each in line.results)
            kinds.setdefault(line.applied.line, []).append(own)
    source = annotated(text, kinds)
    assert not change[0] or change[0] in source
    source = source.replace(*change, 1)
    with fake_group(0, candidate.devices):
        return _Run(proof, kinds, source).judgement


class _Run:
    def __init__(self, proof: ProgramProof, kinds: Mapping[int, list[tuple[dict[str, Kind], ...]]], source: str) -> None:
        import spmd_types as spmd
        import spmd_types.checker

        self.spmd, self.proof, self.kinds, self.judgement = spmd, proof, kinds, Judgement()
        module = load_program(source)
        self.mesh = mesh = MeshHandle(module.Program.mesh_axes)
        self.groups = {name: mesh.group(name) for name, size in mesh.axes.items() if size > 1}
        module.__dict__.update(C=self, _typed=self.typed)
        with spmd.set_current_mesh(list(self.groups.values())), spmd.checker.typecheck():
            self.run(module)

    # -- the program

    def run(self, module: Any) -> None:
        """The forward of one rank, chunk after chunk where it is a pipeline."""
        inputs = {value.name: self.input(value, module.Program) for value in self.proof.graph.inputs}
        roots = [chunk(self.mesh) for chunk in module.Program.chunks] if self.proof.text.chunks else [module.Program(self.mesh)]
        totals: dict[str, Tensor] = {}
        if "count" in self.proof.text.program.methods:
            counter = roots[0] if not self.proof.text.chunks else module.Program(self.mesh)
            self.fill(counter)
            totals = {name: self.reduced(x) for name, x in counter.count(**inputs).items()}
        received: dict[str, Tensor] = {}
        for number, root in enumerate(roots):
            self.fill(root)
            if not self.proof.text.chunks:
                out = root.forward(**inputs, **totals)
            else:
                named = {name: (inputs | totals)[name] for name in root.batch_inputs}
                out = root.forward(**named, **received)
                if number + 1 < len(roots):
                    sent = out if isinstance(out, tuple) else (out,)
                    boundary = self.proof.text.boundaries[number]
                    received = {each.name: x for each, x in zip(boundary, sent, strict=True)}
        loss = out[0] if isinstance(out, tuple) else out
        kind = self.spmd.R if self.proof.graph.forward_only else self.spmd.I
        self.spmd.assert_type(loss, dict.fromkeys(self.groups.values(), kind))

    def reduced(self, total: Tensor) -> Tensor:
        return total

    def input(self, value: Any, program: Any) -> Tensor:
        passed = self.proof._input(value)
        local = passed.tensor.local
        x = torch.zeros(local.shape, dtype=local.dtype)
        return self.set(x.requires_grad_(local.requires_grad), dict(zip(self.proof.axes.names, passed.tensor.kinds, strict=True)))

    def fill(self, root: nn.Module) -> None:
        for block in root.blocks():  # type: ignore[operator,union-attr]
            for spec in block.specs:
                old = getattr(block, spec.attribute)
                new = torch.zeros(old.shape, dtype=old.dtype)
                kinds = self.proof.stored_kinds(spec.shape, spec.placements, 0)
                held = nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new
                (block._parameters if isinstance(old, nn.Parameter) else block._buffers)[spec.attribute] = held
                self.set(held, dict(zip(self.proof.axes.names, kinds, strict=True)))

    # -- types

    def letter(self, kind: Kind) -> Any:
        return self.spmd.V if isinstance(kind, Cut) else getattr(self.spmd, str(kind)[0])

    def set(self, x: Tensor, kinds: Mapping[str, Kind]) -> Tensor:
        self.spmd.assert_type(x, {self.groups[name]: self.letter(kind) for name, kind in kinds.items() if name != MICRO})
        return x

    def typed(self, line: int, results: tuple[Any, ...]) -> None:
        """Compare the types of the results of a line with ours."""
        reasons = []
        for alternative in self.kinds[line]:
            try:
                for x, kinds in zip(results, alternative, strict=True):
                    self._typed(line, x, kinds)
                return
            except Disagreement as error:
                reasons.append(error)
        raise reasons[0]

    def _typed(self, line: int, x: Any, kinds: Mapping[str, Kind]) -> None:
        if not isinstance(x, Tensor):
            return
        if not self.spmd.has_local_type(x):
            self.set(x, kinds)
            self.judgement.counts["taken"] += len(kinds.keys() - {MICRO})
            return
        for name, kind in kinds.items():
            if name == MICRO:
                continue
            axis, ours = self.groups[name], self.letter(kind)
            theirs = self.spmd.maybe_get_axis_local_type(x, axis)
            if theirs is None:
                self.spmd.mutate_type(x, axis, src=None, dst=ours) if False else self.set(x, {name: kind})
                self.judgement.counts["taken"] += 1
            elif theirs is ours or (not x.requires_grad and {theirs, ours} == {self.spmd.R, self.spmd.I}):
                self.judgement.counts["agreed"] += 1
            elif (theirs, ours) in ((self.spmd.V, self.spmd.P), (self.spmd.R, self.spmd.V)):
                self.spmd.mutate_type(x, axis, src=theirs, dst=ours)
                self.judgement.counts["sums" if ours is self.spmd.P else "numbers"] += 1
            else:
                raise Disagreement(f"line {line}: {name} is {theirs} for spmd_types, and {ours} for autopar.checker")

    # -- the namespace C

    def __getattr__(self, name: str) -> Any:
        function = getattr(collectives, name)
        if name in JUDGED:
            return function

        def untyped(*args: Any, **kwargs: Any) -> Any:
            with self.spmd.no_typecheck():
                return function(*args, **kwargs)

        return untyped

    def convert(self, x: Tensor, axis: Any, text: str) -> Tensor:
        source, target = text.split(" -> ")
        if axis.size == 1 or source == target:
            return x
        group, spmd = self.groups[axis.name], self.spmd
        self.judgement.conversions[f"{source[0]} -> {target[0]}"] += 1
        if "," in text or "max" in text or "min" in text:  # runs, and other reductions than sums: their types alone
            spmd.assert_type(x, {group: self._place(source, False)})
            with spmd.no_typecheck():
                out = collectives.convert(x, axis, text)
            others = {each: spmd.get_axis_local_type(x, each) for each in self.groups.values()}
            spmd.assert_type(out, others | {group: self._place(target, False)})
            return out
        src, dst = self._place(source), self._place(target)
        pair = source[0] + target[0]
        if pair in ("SR", "SI"):
            return spmd.all_gather(x, group, src=src, dst=dst)
        if pair == "SS":
            return spmd.all_to_all(x, group, src=src, dst=dst)
        if pair in ("PR", "PI"):
            return spmd.all_reduce(x, group, src=src, dst=dst)
        if pair == "PS":
            return spmd.reduce_scatter(x, group, src=src, dst=dst)
        return spmd.convert(x, group, src=src, dst=dst, expert_mode=True)

    def _place(self, text: str, dims: bool = True) -> Any:
        if text[0] == "S":
            return self.spmd.S(int(text[2:-1].split(",")[0])) if dims else self.spmd.V
        return getattr(self.spmd, text[0])

    def convert_many(self, xs: Any, axis: Any, text: str) -> tuple[Tensor, ...]:
        return tuple(self.convert(x, axis, text) for x in xs)

    def start(self, x: Tensor, axis: Any, text: str) -> Tensor:
        return self.convert(x, axis, text)

    def wait(self, pending: Tensor) -> Tensor:
        return pending


__all__ = ["Disagreement", "Judgement", "Iterator", "contextmanager", "dist", "judge"]
