"""Coalesces small conversions of one kind into one collective, at the place of the first of them.

Before::

    %a_shared = ap.convert(%a, axis='tp', conversion='I -> R')
    %x = aten.mul.Tensor(%n, %a_shared)
    %b_shared = ap.convert(%b, axis='tp', conversion='I -> R')

After::

    %a_shared, %b_shared = ap.convert_many((%a, %b), axis='tp', conversion='I -> R')
    %x = aten.mul.Tensor(%n, %a_shared)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.ir.dims import numel
from autopar.ir.graph import Node, Ref, Value
from autopar.operations.communication import CONVERT, CONVERT_MANY
from autopar.passes.base import BlockState, Context, conversion_of, producer_indices, text_kwarg


@dataclass(slots=True)
class _Bucket:
    """Indices of conversion nodes that are coalesced at `index`, the first of them."""

    index: int
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BucketConversions:
    """Coalesces communicating conversions of tensors of at most `small_bytes` each (in float32)."""

    small_bytes: int = 1 << 20
    name: str = "bucket_conversions"

    def run(self, state: BlockState, context: Context) -> BlockState:
        """Coalesce until nothing changes: the results of a bucket may be converted together on another axis next."""
        buckets = [bucket for bucket in self._buckets(state, context) if len(bucket.members) > 1]
        if not buckets:
            return state
        return self.run(self._coalesced(state, buckets), context)

    def _coalesced(self, state: BlockState, buckets: list[_Bucket]) -> BlockState:
        nodes = state.block.nodes
        coalesced = {bucket.index: self._coalesce([nodes[index] for index in bucket.members]) for bucket in buckets}
        members = {index for bucket in buckets for index in bucket.members}
        remaining = [coalesced.get(index, node) for index, node in enumerate(nodes) if index in coalesced or index not in members]
        return state.with_nodes(remaining)

    def _buckets(self, state: BlockState, context: Context) -> list[_Bucket]:
        producers = producer_indices(state.block)
        values = state.block.values()
        alone = state.offloaded | {name for name, _ in state.partitioned}
        buckets: list[_Bucket] = []
        open_by_kind: dict[tuple[object, ...], list[_Bucket]] = {}
        for index, node in enumerate(state.block.nodes):
            value = node.outputs[0]
            if node.op != CONVERT or value.name in alone:  # results of one coalesced collective share a storage
                continue
            if not conversion_of(node, state, context).communicates or not self._small(node, values, context):
                continue
            recomputed = value.name in state.recomputed
            kind = (text_kwarg(node, "axis"), text_kwarg(node, "conversion"), value.dtype, value.differentiable, recomputed)
            candidates = open_by_kind.setdefault(kind, [])
            source = producers[node.operands()[0]]
            bucket = next((each for each in candidates if source < each.index), None)
            if bucket is None:
                bucket = _Bucket(index)
                candidates.append(bucket)
                buckets.append(bucket)
            bucket.members.append(index)
        return buckets

    def _small(self, node: Node, values: dict[str, Value], context: Context) -> bool:
        sizes = (numel(value.shape, context.batch) for value in (values[node.operands()[0]], node.outputs[0]))
        return max(sizes) * 4 <= self.small_bytes

    @staticmethod
    def _coalesce(members: list[Node]) -> Node:
        first = members[0]
        sources = tuple(Ref(node.operands()[0]) for node in members)
        outputs = tuple(node.outputs[0] for node in members)
        return replace(first, op=CONVERT_MANY, args=(sources,), outputs=outputs, source="")
