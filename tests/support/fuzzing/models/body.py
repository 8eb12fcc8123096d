"""The body of one forward as it is written: each statement is tried on example tensors, and kept where it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.fuzzing.models.statements import STATEMENTS

SIZES = (1, 2, 2, 3, 4, 4, 4, 5, 6, 6, 8, 8, 12)
MOST_ELEMENTS, LARGEST, TRIES = 1500, 30.0, 12


def names() -> dict[str, Any]:
    """What the text of a model may name."""
    return {"math": math, "torch": torch, "nn": nn, "F": F, "checkpoint": checkpoint, "Plain": lambda tensor: tensor}


@dataclass(slots=True)
class Body:
    """The body of one forward as it is written. `live` is a module to try statements on, `values` what they gave."""

    draw: Random
    live: nn.Module
    values: dict[str, Tensor]
    given: frozenset[str]
    space: dict[str, Any]
    made: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    count: int = 0

    def fresh(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def statement(self, kind: str = "") -> str | None:
        """Adds a statement, and gives the name of its value; None where none of a few draws runs."""
        kinds = list(STATEMENTS)
        for _ in range(TRIES):
            chosen = kind or self.draw.choices(kinds, [weight for _, weight in STATEMENTS.values()])[0]
            name = self.attempt(self.draw.choice(STATEMENTS[chosen][0]))
            if name is not None:
                self.kinds.add(chosen)
                return name
        return None

    def attempt(self, template: str) -> str | None:
        """Fills the slots and runs it."""
        slots = self.slots(template)
        if slots is None:
            return None
        module = self.fresh("m") if template.startswith(("nn.", "Plain(")) else ""
        slots["M"] = module
        try:
            filled = template.format(**slots)
        except (KeyError, IndexError, ValueError):
            return None
        maker, body = filled.split(" @ ", 1) if module else ("", filled)
        *before, value = body.split(";")
        result = self.fresh()
        lines = [*before, f"{result} = {value}"]
        space = {**names(), **self.space, **self.values, "self": self.live}
        try:
            if module:
                made = eval(maker, space)
                if isinstance(made, nn.Module):
                    made.double().train(self.live.training)
                elif isinstance(made, nn.Parameter):
                    made = nn.Parameter(made.double(), made.requires_grad)
                elif isinstance(made, nn.Buffer):
                    made = nn.Buffer(made.double())
                else:
                    made = made.double()
                setattr(self.live, module, made)
            exec("\n".join(lines), space)
            if not fits(space[result]):
                raise ValueError
        except Exception:
            if module and hasattr(self.live, module):
                delattr(self.live, module)
            return None
        if module:
            maker = maker.removeprefix("Plain") if maker.startswith("Plain") else maker
            self.made.append(f"self.{module} = {maker}")
        self.lines += lines
        self.keep(result, space[result], [str(slots[each]) for each in "xyzmn" if each in slots and f"{{{each}}}" in template])
        return result

    def keep(self, name: str, value: Tensor, read: list[str]) -> None:
        self.values[name] = value
        self.unused = [each for each in self.unused if each not in read]
        if value.is_floating_point():
            self.unused.append(name)

    def slots(self, template: str) -> dict[str, Any] | None:
        floats = [name for name, value in self.values.items() if value.is_floating_point()]
        whole = [name for name, value in self.values.items() if value.dtype is torch.int64]
        masks = [name for name, value in self.values.items() if value.dtype is torch.bool]
        if not floats or ("{n}" in template and not whole) or ("{m}" in template and not masks):
            return None
        draw = self.draw
        recent = self.unused[-3:] or floats
        out: dict[str, Any] = {"x": draw.choice(recent if draw.random() < 0.7 else floats)}
        x = self.values[out["x"]]
        near = [name for name in floats if broadcasts(self.values[name], x)]
        for slot in "yz":
            out[slot] = draw.choice(near if draw.random() < 0.85 else floats)
        out |= {"n": draw.choice(whole or [""]), "m": draw.choice(masks or [""])}
        for slot in "de":
            out[slot] = draw.randrange(-x.dim(), x.dim()) if x.dim() else 0
        out["size"] = x.shape[out["d"]] if x.dim() else 1
        out["last"] = x.shape[-1] if x.dim() else 1
        out["rows"] = x.shape[-2] if x.dim() > 1 else 1
        out["chan"] = x.shape[1] if x.dim() > 1 else 1
        out |= {"o": draw.choice(SIZES), "k": draw.randrange(3)}
        if any(f"{{{each}}}" in template for each in "tuv"):
            out |= {each: self.fresh("t") for each in "tuv"}
        return out


def broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(i == j or 1 in (i, j) for i, j in zip(reversed(a.shape), reversed(b.shape), strict=False))


def fits(value: Any) -> bool:
    """Whether a value is a tensor that further statements can take."""
    if not isinstance(value, Tensor) or not 0 < value.numel() <= MOST_ELEMENTS or value.dim() > 5:
        return False
    if value.is_floating_point():
        return value.dtype is torch.float64 and bool(value.isfinite().all()) and float(value.detach().abs().max()) < LARGEST
    return value.dtype in (torch.int64, torch.bool)
