"""Somebody else's judge: generated programs under the type checker of Meta's ``spmd_types``, on a fake process group.

Their local types are ours on each axis (V is a tensor that is cut), so a program becomes one of theirs where each conversion is
called by their name for it, and each line is followed by an annotation: the type that `autopar.checker` derived of its result.
Their checker infers the type by itself, and the two must agree. What it cannot know is said in `Judgement`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
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

JUDGED = ("cross_entropy_sum", "count_valid")
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
    """The text with the annotation of each line after it. Slices become ``torch.narrow``: they have no rule for subscripts."""
    tree = ast.parse(text)

    class Annotate(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> Any:  # noqa: N802
            items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if not all(isinstance(each, ast.Slice) for each in items):
                return node
            sizes = [", ".join(ast.unparse(x) if x else "None" for x in (each.lower, each.upper, each.step)) for each in items]  # type: ignore[attr-defined]
            return ast.parse(f"_sliced({ast.unparse(node.value)}, ({', '.join(f'slice({s})' for s in sizes)},))").body[0].value  # type: ignore[attr-defined]

        def visit_Assign(self, node: ast.Assign) -> Any:  # noqa: N802
            if node.lineno not in lines or not isinstance(node.targets[0], (ast.Name, ast.Tuple)):
                return self.generic_visit(node)
            names = [each.id for each in getattr(node.targets[0], "elts", [node.targets[0]])]
            self.generic_visit(node)
            return [node, *ast.parse(f"_typed({node.lineno}, ({', '.join(names)},))").body]

    return ast.unparse(ast.fix_missing_locations(Annotate().visit(tree)))


def _sliced(x: Tensor, items: Sequence[slice]) -> Tensor:
    for dim, each in enumerate(items):
        start, stop, step = each.indices(x.shape[dim])
        if (start, stop, step) == (0, x.shape[dim], 1):
            continue
        x = torch.narrow(x, dim, start, stop - start)
        if step != 1:
            x = torch.index_select(x, dim, torch.arange(0, stop - start, step))
    return x


def judge(text: str, graph: Graph, candidate: Candidate, change: tuple[str, str] = ("", ""), compare: bool = True) -> Judgement:
    """Run the program of one rank under their checker. SpmdTypeError (theirs) or `Disagreement` where it is refused. `change`: of
    the annotated text. Without `compare` our types only stand in where they have none."""
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
        return _Run(proof, kinds, source, compare).judgement


class _Run:
    def __init__(
        self, proof: ProgramProof, kinds: Mapping[int, list[tuple[dict[str, Kind], ...]]], source: str, compare: bool
    ) -> None:
        import spmd_types as spmd
        import spmd_types.checker

        self.spmd, self.proof, self.kinds, self.compare, self.judgement = spmd, proof, kinds, compare, Judgement()
        module = load_program(source)
        self.mesh = mesh = MeshHandle(module.Program.mesh_axes)
        self.groups = {name: mesh.group(name) for name, size in mesh.axes.items() if size > 1}
        functions = SimpleNamespace(**{name: getattr(F, name) for name in dir(F)})
        functions.linear = partial(self.product, F.linear)
        module.__dict__.update(C=self, F=functions, _typed=self.typed, _sliced=_sliced)
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
            totals = counter.count(**inputs)
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

    def input(self, value: Any, program: Any) -> Tensor:
        passed = self.proof.interface.input(value)
        local = passed.tensor.local
        with self.spmd.no_typecheck():
            x = torch.zeros(local.shape, dtype=local.dtype).requires_grad_(local.requires_grad)
        return self.set(x, dict(zip(self.proof.axes.names, passed.tensor.kinds, strict=True)))

    def fill(self, root: nn.Module) -> None:
        for block in root.blocks():  # type: ignore[operator,union-attr]
            for spec in block.specs:
                old = getattr(block, spec.attribute)
                kinds = self.proof.interface.stored_kinds(spec.shape, spec.placements, 0)
                with self.spmd.no_typecheck():
                    new = torch.zeros(old.shape, dtype=old.dtype)
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
                self.set(x, {name: kind})
                self.judgement.counts["taken"] += 1
            elif theirs is ours or (not x.requires_grad and {theirs, ours} == {self.spmd.R, self.spmd.I}):
                self.judgement.counts["agreed"] += 1
            elif (theirs, ours) in ((self.spmd.V, self.spmd.P), (self.spmd.R, self.spmd.V)):
                self.spmd.mutate_type(x, axis, src=theirs, dst=ours)
                self.judgement.counts["sums" if ours is self.spmd.P else "numbers"] += 1
            elif self.compare:
                raise Disagreement(f"line {line}: {name} is {theirs} for spmd_types, and {ours} for autopar.checker")

    def product(self, function: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A product whose bias is partial: the sum over ranks of its operands' parts, which is written as such, and the bias."""
        if bias is None:
            return function(x, weight)
        types = {axis: self.spmd.get_axis_local_type(bias, axis) for axis in self.groups.values()}
        if self.spmd.P not in types.values():
            return function(x, weight, bias)
        out = function(x, weight)
        for axis, kind in types.items():
            if kind is self.spmd.P and self.spmd.get_axis_local_type(out, axis) is self.spmd.V:
                self.spmd.mutate_type(out, axis, src=self.spmd.V, dst=self.spmd.P)
                self.judgement.counts["sums"] += 1
        return out + bias

    def linear_kn(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product(collectives.linear_kn, x, weight, bias)

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
