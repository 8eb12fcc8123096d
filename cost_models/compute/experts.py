"""Seconds of routed experts on one device: grouped matrix products between permutations of tokens.

Routing is balanced: a device that holds ``E / ep`` of E experts receives as many token copies as it sends, its tokens times
`top_k`. Megatron-Core's MoE layer (arXiv 2504.14960, section 3) runs: permute, exchange, sort by expert, up product, gate, down
product, unsort, exchange, unpermute.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.compute.kernels import product_seconds, streaming_seconds
from autopar.cost_models.hardware.device_specs import Device
from autopar.cost_models.tensors.expert_shapes import ExpertShapes

_ACCESSES = 8
"""How often a token copy of `hidden` elements is read or written by permute, sort, unsort and unpermute, forward."""

_CAST = 2
"""Accesses (of bfloat16 size) of a cast to float8: an element is read, and written twice, as it is and transposed. Casts of dense
layers are part of the kernel before them (a norm, an activation); between a permutation and products of groups they are
kernels of their own, of each operand of every product."""

_PADDED = 4
"""Accesses of `hidden` with which the groups are padded for float8, whose rows come in multiples of 16, and unpadded after (the
padding modules of Transformer Engine around Megatron-Core's TEGroupedMLP)."""

_KERNELS = 8
"""Launches of one pass beside the exchanges."""


@dataclass(frozen=True, slots=True)
class ExpertsCost:
    """Prices routed experts of these global shapes, whose activations and weights have `itemsize` bytes an element.
    `recompute_activation`: the backward computes the activation function again."""

    shapes: ExpertShapes
    itemsize: int
    recompute_activation: bool = False

    def seconds(
        self, device: Device, dtype: str, token_shards: int, inner_shards: int, expert_shards: int | None = None
    ) -> tuple[float, float]:
        """Forward and backward on one rank. Token copies are sharded `token_shards` ways, the inner dimension of each expert
        `inner_shards` ways, the experts `expert_shards` ways (None: as the operation says)."""
        shapes, hidden = self.shapes, self.shapes.hidden
        local = max(1, shapes.experts // (expert_shards or shapes.ep))
        copies = shapes.copies / token_shards
        rows, up, down = max(1, round(copies / local)), shapes.up // inner_shards, shapes.down // inner_shards
        forward = product_seconds(device, dtype, local, rows, up, hidden)
        forward += product_seconds(device, dtype, local, rows, hidden, down)
        backward = product_seconds(device, dtype, local, rows, hidden, up)
        backward += product_seconds(device, dtype, local, rows, down, hidden)
        backward += product_seconds(device, dtype, local, up, hidden, rows)
        backward += product_seconds(device, dtype, local, hidden, down, rows)
        weights = local * (up + down) * hidden * self.itemsize
        moved = copies * self.itemsize * (_ACCESSES * hidden + up + down)
        cast = cast_back = 0.0
        if dtype == "float8":
            cast = copies * self.itemsize * ((_CAST + _PADDED) * hidden + _CAST * down)
            cast_back = copies * self.itemsize * ((_CAST + _PADDED) * hidden + _CAST * up)
        recomputed = copies * self.itemsize * (up + down) * self.recompute_activation
        floor = device.launch_seconds
        return (
            max(forward, streaming_seconds(device, weights), 2 * floor)
            + streaming_seconds(device, moved + cast)
            + _KERNELS * floor,
            max(backward, streaming_seconds(device, 3 * weights), 4 * floor)
            + streaming_seconds(device, 2 * moved + cast_back + recomputed)
            + _KERNELS * floor,
        )
