"""Compares two runs tensor by tensor, within the rounding of their dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from autopar.verification.single import LEARNING_RATE

NOISE = 1e-5
"""A gradient whose values are all below this fraction of the largest gradient is taken for rounding noise."""
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 5e-2}
"""The tolerances by compute dtype; for the loss and outputs also by their own dtype, which is float32 in some models."""
ROUNDING_FACTOR = 4.0
"""A program in float32 may be so many times as far from one process as that is from float64: it adds up in other orders."""

GROUPS = ("loss", "outputs", "gradients", "parameters", "buffers")


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one tensor, relative to its own largest value (for noise: to a tenth of the largest gradient).
    `allowed` counts as equal; `rounding` is how far one process is from float64 (0: not known)."""

    what: str
    name: str
    relative: float
    allowed: float = 0.0
    rounding: float = 0.0

    @property
    def equal(self) -> bool:
        return self.relative <= self.allowed


def tolerance(what: str, compute: str, dtype: torch.dtype) -> float:
    """Return the largest relative difference that counts as equal, of a tensor of this dtype."""
    least = TOLERANCE[compute]
    return max(least, TOLERANCE.get(str(dtype).removeprefix("torch."), least)) if what in ("loss", "outputs") else least


def compare(
    reference: Mapping[str, Any], program: Mapping[str, Any], compute: str, exact: Mapping[str, Any] | None
) -> list[Difference]:
    """Compare every tensor of two runs. `exact`: the same run of one process in float64, if there is one."""
    raw = _relatives(reference, program)
    rounding = {(d.what, d.name): d.relative for d in _relatives(exact, reference)} if exact is not None else {}
    usual = {what: median([size for (each, _), size in rounding.items() if each == what] or [0.0]) for what in GROUPS}
    out = []
    for each in raw:
        own = rounding.get((each.what, each.name), 0.0)
        tensor = reference["loss"] if each.what == "loss" else reference["outputs"].get(each.name, reference["loss"])
        least = tolerance(each.what, compute, tensor.dtype)
        own = own if math.isfinite(own) else 0.0
        allowed = max(least, ROUNDING_FACTOR * max(own, usual[each.what]))
        out.append(Difference(each.what, each.name, each.relative, allowed, own))
    return out


def _relatives(reference: Mapping[str, Any], program: Mapping[str, Any]) -> list[Difference]:
    out = [Difference("loss", "loss", relative(reference["loss"], program["loss"]))]
    for name, tensor in reference["outputs"].items():
        there = program["outputs"].get(name)
        if there is not None:
            out.append(Difference("outputs", name or "result", relative(tensor, there)))
    gradients = reference.get("gradients", {})
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for name, tensor in gradients.items():
        there = program["gradients"].get(name)
        there = torch.zeros_like(tensor) if there is None else there  # a parameter that nothing reaches has none
        out.append(Difference("gradients", name, relative(tensor, there, largest)))
    for name, tensor in reference.get("state", {}).items():
        what = "parameters" if name in gradients else "buffers"
        there = program["state"].get(name)
        if there is not None:
            beside = LEARNING_RATE * largest if what == "parameters" else _largest_beside(name, reference["state"])
            out.append(Difference(what, name, relative(tensor, there, beside)))
        elif what == "parameters" and bool(gradients[name].any()):
            out.append(Difference(what, name, math.inf))
    return out


def _largest_beside(name: str, state: Mapping[str, Tensor]) -> float:
    """The largest value of the same module's buffers and parameters: the running mean of what batch norm has centred before is
    noise beside the running variance."""
    module = name.rpartition(".")[0]
    beside = (tensor for other, tensor in state.items() if other.rpartition(".")[0] == module and tensor.numel())
    return max((float(tensor.detach().abs().max()) for tensor in beside if not tensor.is_complex()), default=0.0)


def relative(reference: Tensor, program: Tensor, largest: float = 0.0) -> float:
    """The largest difference over the largest value of the reference."""
    if reference.shape != program.shape:
        return math.inf
    a, b = reference.detach().double(), program.detach().double()
    if not a.numel():
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    difference, peak = (
        float((a - b).masked_fill(same, 0.0).abs().max()),
        float(a[a.isfinite()].abs().max()) if a.isfinite().any() else 0.0,
    )
    scale = peak if peak > NOISE * largest else 0.1 * largest
    return difference / max(scale, 1e-300) if math.isfinite(difference) else math.inf
