"""Seconds of routed experts on one device: grouped matrix products between permutations of tokens.

Every token goes through `top_k` of E experts, evenly (balanced routing). A device that holds ``E / ep`` of them gets as many
token copies as it sends: its tokens times `top_k`. Megatron-Core's MoE layer (arXiv 2504.14960, section 3) runs: permute,
exchange, sort by expert, up product, gate, down product, unsort, exchange, unpermute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.cost_models.devices import Device
from autopar.cost_models.kernels import product_seconds, streaming_seconds
from autopar.ir.graph import Node

_MOVES = 8
"""Times that a token copy of `hidden` elements is read or written by permute, sort, unsort and unpermute, forward."""

_KERNELS = 8
"""Launches of one pass beside the exchanges."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Global sizes. `up` counts both halves where there is a gate."""

    tokens: int
    top_k: int
    experts: int
    ep: int
    hidden: int
    up: int
    down: int
    itemsize: int

    @staticmethod
    def of(node: Node, operands: Sequence[Sequence[int]], itemsize: int) -> Experts:
        """From ``ap.experts(x, scores, up, down, top_k, ep=...)``, or ``ap.moe_experts(x, experts, weights, up, down, ...)``."""
        if node.op == "ap.moe_experts":
            x, ids, _, up, down, *_ = operands
            wide, inner = prod(up[1:]) // x[-1], prod(down[1:]) // x[-1]
            return Experts(prod(x[:-1]), ids[-1], up[0], 1, x[-1], wide, inner, itemsize)
        x, _, up, down = operands
        top_k, ep = node.args[4], dict(node.kwargs).get("ep", 1)
        assert isinstance(top_k, int) and isinstance(ep, int)
        return Experts(prod(x[:-1]), top_k, up[0], ep, x[-1], up[1], down[2], itemsize)

    def seconds(
        self, device: Device, dtype: str, token_cut: int, inner_cut: int, expert_cut: int | None = None
    ) -> tuple[float, float]:
        """Forward and backward. Copies of tokens are cut into `token_cut` parts, the inside of each expert into `inner_cut`."""
        held = max(1, self.experts // (expert_cut or self.ep))
        copies = self.tokens * self.top_k / token_cut
        rows, up, down = max(1, round(copies / held)), self.up // inner_cut, self.down // inner_cut
        forward = product_seconds(device, dtype, held, rows, up, self.hidden)
        forward += product_seconds(device, dtype, held, rows, self.hidden, down)
        backward = product_seconds(device, dtype, held, rows, self.hidden, up)
        backward += product_seconds(device, dtype, held, rows, down, self.hidden)
        backward += product_seconds(device, dtype, held, up, self.hidden, rows)
        backward += product_seconds(device, dtype, held, self.hidden, down, rows)
        weights = held * (up + down) * self.hidden * self.itemsize
        moved = copies * self.itemsize * (_MOVES * self.hidden + up + down)
        floor = device.launch_seconds
        return (
            max(forward, streaming_seconds(device, weights), 2 * floor) + streaming_seconds(device, moved) + _KERNELS * floor,
            max(backward, streaming_seconds(device, 3 * weights), 4 * floor)
            + streaming_seconds(device, 2 * moved)
            + _KERNELS * floor,
        )
