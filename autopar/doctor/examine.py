"""The examination of a model: captures it and lists what is refused, replicated, fixed or slow. Nothing is planned."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

from torch import nn

from autopar.capture.bind import batch_of, bind_inputs
from autopar.capture.export import Export, input_shapes
from autopar.capture.options import CaptureOptions
from autopar.capture.tracing.guards import refuse_complex, refuse_hooks
from autopar.doctor import findings
from autopar.doctor.findings import KINDS, Finding
from autopar.errors import AutoparError, CaptureError
from autopar.ir.graph import Graph
from autopar.ops.opaque import opaque
from autopar.plan_inputs import ExampleInputs, registry, split_inputs

_MOST_ATTEMPTS = 12
_SECONDS = 3.0
"""A capture that took longer is not made a second time for the lengths."""


@dataclass(frozen=True, slots=True)
class Examination:
    """The findings on a model. `graph` is None where no plan can be made; `examined_lengths`: inputs were tried with open
    lengths."""

    graph: Graph | None
    findings: tuple[Finding, ...]
    examined_lengths: bool

    @property
    def can_be_planned(self) -> bool:
        return self.graph is not None and not any(each.kind == "refused" for each in self.findings)


def examine(
    model: nn.Module, example: ExampleInputs, compute: str, batch_dim: int | Mapping[str, int] | None = None
) -> Examination:
    """Return every finding, the worst first. The model may be on the meta device; it is not changed."""
    args, kwargs = split_inputs(example)
    results: list[Finding] = []
    for check in (refuse_hooks, refuse_complex):
        results += _refusal(check, model)
    dims = tuple(batch_dim.items()) if isinstance(batch_dim, Mapping) else batch_dim
    options = CaptureOptions(compute, batch_dim=dims)
    began = monotonic()
    export, refusals = _capture(model, args, kwargs, options)
    results = list(dict.fromkeys((*results, *refusals)))
    if export is None:
        return Examination(None, _worst_first(results), False)
    quick = monotonic() - began < _SECONDS and not results
    closed: dict[str, tuple[int, ...]] = {}
    if quick:
        closed = _fixed_lengths(model, args, kwargs, options)
    graph = export.graph
    left_whole = bool(results)  # here, so that the rest could be captured
    replicated = findings.replicated_operations(graph, registry())
    results += [each for each in replicated if not (left_whole and " is opaque" in each.what)]
    results += findings.fixed_sizes(graph, closed)
    results += findings.constant_tensors(graph)
    results += findings.slow_products(graph, compute)
    results += findings.unfolded_layers(graph, model)
    return Examination(graph, _worst_first(results), quick)


def _refusal(check: Callable[[nn.Module], None], model: nn.Module) -> list[Finding]:
    try:
        check(model)
    except CaptureError as problem:
        return [_as_finding(problem)]
    return []


def _as_finding(problem: AutoparError) -> Finding:
    """Split a message ``where: what; remedy``."""
    text = str(problem)
    where, what = "the model", text
    if match := re.match(r"(\S+\.py:\d+(?: \(module [^)]*\))?): (.*)", text, re.S):
        where, what = match[1].rsplit("/", 1)[-1], match[2]
    cause, _, remedy = what.partition("; ")
    return Finding("refused", cause, where, remedy or "see the line")


def _capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: CaptureOptions
) -> tuple[Export | None, list[Finding]]:
    """The export, and all that is refused: a refused submodule is left whole, and the rest is captured."""
    refusals: list[Finding] = []
    whole: list[nn.Module] = []
    try:
        for _ in range(_MOST_ATTEMPTS):
            try:
                return Export(model, args, kwargs, options), refusals
            except CaptureError as problem:
                refusals.append(_as_finding(problem))
                path = re.search(r"\(module ([^)\s]+)\)", str(problem))
                replaced = _leave_whole(model, path[1] if path else "")
                if replaced is None:
                    return None, refusals
                whole.append(replaced)
        return None, refusals
    finally:
        for module in whole:
            module.__dict__.pop("forward", None)


def _leave_whole(model: nn.Module, path: str) -> nn.Module | None:
    """Return the refused module, made opaque; None where there is none, or it is opaque already or has a forward of its own."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    return None if not path or "forward" in module.__dict__ else opaque(module)


def _fixed_lengths(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: CaptureOptions
) -> dict[str, tuple[int, ...]]:
    """Return the dimensions of inputs that are fixed although they were left open."""
    tensors = bind_inputs(model, args, kwargs).tensors
    lengths = findings.lengths_of(tensors, batch_of(tensors))
    if not lengths:
        return {}
    try:
        shapes = input_shapes(Export(model, args, kwargs, options, lengths).traced)
    except AutoparError:
        return lengths
    fixed = {name: tuple(dim for dim in dims if shapes[name][dim].is_Integer) for name, dims in lengths.items()}
    return {name: dims for name, dims in fixed.items() if dims}


def _worst_first(unsorted: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(unsorted, key=lambda each: KINDS.index(each.kind)))
