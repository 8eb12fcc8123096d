"""Seconds of routed experts on one device: grouped matrix products between permutations of tokens.

What runs beside the products is a fact of a release, not of the model. Megatron-Core's own dispatcher and DeepEP permute, sort
and pad in kernels of their own. HybridEP dispatches into memory that is sorted by expert and padded, and combines from it
(Megatron-Core ``moe/token_dispatcher.py``, `_HybridEPManager`, from memory). From release 26.06 of NeMo's containers on,
the activation, its gradient and the casts of what it gives are epilogues of the grouped products
(``use_transformer_engine_op_fuser``, ``NVTE_CUTEDSL_FUSED_GROUPED_MLP``: NVIDIA-NeMo/Megatron-Bridge v0.5.0,
scripts/performance/utils; v0.6.0, perf_recipes). Nothing of it is fitted.

Routing is balanced: a device that holds ``E / ep`` of E experts receives as many token copies as it sends, its tokens times
`top_k`. Megatron-Core's MoE layer (arXiv 2504.14960, section 3) runs: permute, exchange, sort by expert, up product, gate, down
product, unsort, exchange, unpermute.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_models.compute.kernels import product_memory_seconds, product_seconds, streaming_seconds
from autopar.cost_models.hardware.device_specs import Device
from autopar.operations.experts import ExpertShapes

_ACCESSES = 8
"""The number of times that a token copy of `hidden` elements is read or written by permute, sort, unsort and unpermute,
forward."""

_DISPATCHED = 2
"""Accesses of `hidden` where the dispatcher permutes: a copy is written by the dispatch, and read by the combination; the
gradient of a copy likewise."""

_CAST = 2
"""Accesses (of bfloat16 size) of a cast to float8: an element is read, and written twice, as it is and transposed. Casts of dense
layers are part of the kernel before them (a norm, an activation); between a permutation and products of groups they are
kernels of their own, of each operand of every product."""

_PADDED = 4
"""Accesses of `hidden` with which the groups are padded for float8, whose rows come in multiples of 16, and unpadded after (the
padding modules of Transformer Engine around Megatron-Core's TEGroupedMLP)."""

_KERNELS = 8
"""Launches of one pass beside the exchanges."""


_RAGGED_LAUNCHES = (300, 600)
"""Launches of the host in a layer whose groups of tokens have sizes that the host reads each time (dropless): casts, pads,
splits and products of each group, and copies of the sizes. Not counted, but told by a run of release 25.11 in eager mode, in
which a layer of Qwen3-30B with one sequence of 4,096 tokens takes 9.2 ms on a B200 (mb-030), where with dropped tokens, whose
groups are equal, it takes 4.7 ms (mb-044): at `Device.host_launch_seconds` of 10 us."""


@dataclass(frozen=True, slots=True)
class ExpertsCost:
    """Prices routed experts of these global shapes, whose activations and weights have `itemsize` bytes an element.
    `recompute_activation`: the backward computes the activation function again. `permuted`: the dispatcher writes and reads
    copies that are sorted by expert and padded. `fused`: the activation and its cast are part of the grouped products. `ragged`:
    the host reads the sizes of the groups."""

    shapes: ExpertShapes
    itemsize: int
    recompute_activation: bool = False
    permuted: bool = False
    fused: bool = False
    ragged: bool = False

    @property
    def launches(self) -> tuple[int, int]:
        """The launches of the host, forward and backward."""
        return _RAGGED_LAUNCHES if self.ragged else (_KERNELS + 2, _KERNELS + 4)

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
        accesses = self._accesses(dtype, hidden, *((0, 0) if self.fused else (up, down)))
        forward_bytes, backward_bytes = (copies * self.itemsize * each for each in accesses)
        floor, operands = device.launch_seconds, copies * self.itemsize * (2 * hidden + up + down)
        return (
            _grouped_seconds(device, forward, weights, operands, 2) + streaming_seconds(device, forward_bytes) + _KERNELS * floor,
            _grouped_seconds(device, backward, 3 * weights, 2 * operands, 4)
            + streaming_seconds(device, backward_bytes)
            + _KERNELS * floor,
        )

    def _accesses(self, dtype: str, hidden: int, up: int, down: int) -> tuple[float, float]:
        """Elements that kernels beside the products read or write for each token copy, forward and backward. `up` and `down` are
        those of an activation function that has a kernel of its own."""
        moved, moved_back = (_DISPATCHED * hidden,) * 2 if self.permuted else (_ACCESSES * hidden, 2 * _ACCESSES * hidden)
        forward, backward = moved + up + down, moved_back + 2 * (up + down) + (up + down) * self.recompute_activation
        if dtype == "float8":
            each = (_CAST + _PADDED * (not self.permuted)) * hidden
            forward, backward = forward + each + _CAST * down, backward + each + _CAST * up
        return forward, backward


def _grouped_seconds(device: Device, arithmetic_seconds: float, weight_bytes: float, operand_bytes: float, kernels: int) -> float:
    """The slower of arithmetic and weights; a CPU packs what it multiplies, as in `kernels.operation_seconds`."""
    if device.product_bytes_per_second:
        return arithmetic_seconds + product_memory_seconds(device, weight_bytes + operand_bytes)
    return max(arithmetic_seconds, streaming_seconds(device, weight_bytes), kernels * device.launch_seconds)
