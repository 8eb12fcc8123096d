"""Sizes of routed experts, whichever operation they come from: ``ap.moe_experts`` (a captured model's) or ``ap.experts`` and
``ap.experts_float8`` (of published runs, which have the router's softmax inside)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.ir.graph import Arg


@dataclass(frozen=True, slots=True)
class ExpertShapes:
    """Global sizes. Each of `tokens` goes through `top_k` of `experts`; `up` counts both halves where there is a gate. `ep` is
    the expert parallelism that the operation itself names (1: placements say it)."""

    tokens: int
    top_k: int
    experts: int
    ep: int
    hidden: int
    up: int
    down: int

    @staticmethod
    def of(op: str, args: Sequence[Arg], kwargs: Mapping[str, Arg], operands: Sequence[Sequence[int]]) -> ExpertShapes:
        """From ``ap.experts(x, scores, up, down, top_k, ep=...)``, or ``ap.moe_experts(x, experts, weights, up, down, ...)``."""
        if op == "ap.moe_experts":
            x, ids, _, up, down, *_ = operands
            top_k, ep = ids[-1], 1
            wide, inner = prod(up[1:]) // x[-1], prod(down[1:]) // x[-1]
        else:
            x, _, up, down = operands
            given_top_k, given_ep = args[4], kwargs.get("ep", 1)
            assert isinstance(given_top_k, int) and isinstance(given_ep, int)
            top_k, ep = given_top_k, given_ep
            wide, inner = up[1], down[2]
        return ExpertShapes(tokens=prod(x[:-1]), top_k=top_k, experts=up[0], ep=ep, hidden=x[-1], up=wide, down=inner)

    @property
    def copies(self) -> int:
        """Token copies: each token once for each of its experts."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> float:
        """Of the forward: both products of each token copy."""
        return 2.0 * self.copies * ((self.up + self.down) * self.hidden)
