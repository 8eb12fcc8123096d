"""Captures a model and lists what is refused, replicated, fixed or slow. Nothing is planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torch import nn

from autopar.capture.bind import batch_of, bind_inputs
from autopar.capture.lengths import CaptureOptions, Export, input_shapes
from autopar.capture.tracing.guards import refuse_complex, refuse_hooks
from autopar.doctor import findings
from autopar.doctor.findings import KINDS, Finding
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph
from autopar.ops.opaque import opaque
from autopar.planning import ExampleInputs, registry, split_inputs

_MOST_ATTEMPTS = 12
_SECONDS = 3.0
"""A capture that took longer is not made a second time for the lengths."""


@dataclass(frozen=True, slots=True)
class Examination:
    """`graph` is None where no plan can be made; `examined_lengths` whether inputs were tried with open lengths."""

    graph: Graph | None
    findings: tuple[Finding, ...]
    examined_lengths: bool

    @property
    def can_be_planned(self) -> bool:
        return self.graph is not None and not any(each.kind == "refused" for each in self.findings)


def examine(
    model: nn.Module, example: ExampleInputs, compute: str, batch_dim: int | Mapping[str, int] | None = None
) -> Examination:
    """Every finding, the worst first. The model may be on the meta device; it is not changed."""
    args, kwargs = split_inputs(example)
    found: list[Finding] = []
    for check in (refuse_hooks, refuse_complex):
        found += _refusal(check, model)
    dims = tuple(batch_dim.items()) if isinstance(batch_dim, Mapping) else batch_dim
    options = CaptureOptions(compute, batch_dim=dims)
    began = monotonic()
    export, refusals = _captured(model, args, kwargs, options)
    found = list(dict.fromkeys((*found, *refusals)))
    if export is None:
        return Examination(None, _sorted(found), False)
    quick = monotonic() - began < _SECONDS and not found
    closed: dict[str, tuple[int, ...]] = {}
    if quick:
        closed = _closed(model, args, kwargs, options)
    graph = export.graph
    left_whole = bool(found)  # here, so that the rest could be captured
    found += [each for each in findings.replicated(graph, registry()) if not (left_whole and " is opaque" in each.what)]
    found += findings.fixed(graph, closed)
    found += findings.constants(graph)
    found += findings.slow(graph, compute)
    found += findings.unfolded(graph, model)
    return Examination(graph, _sorted(found), quick)


def _refusal(check: Callable[[nn.Module], None], model: nn.Module) -> list[Finding]:
    try:
        check(model)
    except CaptureError as problem:
        return [_refused(problem)]
    return []


def _refused(problem: AutoparError) -> Finding:
    """``where: what; remedy`` of a message."""
    text = str(problem)
    where, what = "the model", text
    if match := re.match(r"(\S+\.py:\d+(?: \(module [^)]*\))?): (.*)", text, re.S):
        where, what = match[1].rsplit("/", 1)[-1], match[2]
    said, _, remedy = what.partition("; ")
    return Finding("refused", said, where, remedy or "see the line")


def _captured(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: CaptureOptions
) -> tuple[Export | None, list[Finding]]:
    """The export, and all that is refused: a refused submodule is left whole, and the rest is captured."""
    found: list[Finding] = []
    whole: list[nn.Module] = []
    try:
        for _ in range(_MOST_ATTEMPTS):
            try:
                return Export(model, args, kwargs, options), found
            except CaptureError as problem:
                found.append(_refused(problem))
                path = re.search(r"\(module ([^)\s]+)\)", str(problem))
                replaced = _leave_whole(model, path[1] if path else "")
                if replaced is None:
                    return None, found
                whole.append(replaced)
        return None, found
    finally:
        for module in whole:
            module.__dict__.pop("forward", None)


def _leave_whole(model: nn.Module, path: str) -> nn.Module | None:
    """The refused module, made opaque; None where there is none, or it is opaque already or has a forward of its own."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return None if not path or "forward" in module.__dict__ else opaque(module)


def _closed(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: CaptureOptions
) -> dict[str, tuple[int, ...]]:
    """Dimensions of inputs that are fixed although they were left open."""
    tensors = bind_inputs(model, args, kwargs).tensors
    wanted = findings.lengths_of(tensors, batch_of(tensors))
    if not wanted:
        return {}
    try:
        shapes = input_shapes(Export(model, args, kwargs, options, wanted).traced)
    except AutoparError:
        return wanted
    fixed = {name: tuple(dim for dim in dims if shapes[name][dim].is_Integer) for name, dims in wanted.items()}
    return {name: dims for name, dims in fixed.items() if dims}


def _sorted(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda each: KINDS.index(each.kind)))
