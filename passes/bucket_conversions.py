"""Small conversions of one kind that can happen at one point become one collective.

Before::

    %a_shared = ap.convert(%a, axis='tp', move='I -> R')
    %x = aten.mul.Tensor(%n, %a_shared)
    %b_shared = ap.convert(%b, axis='tp', move='I -> R')

After::

    %a_shared, %b_shared = ap.convert_many((%a, %b), axis='tp', move='I -> R')
    %x = aten.mul.Tensor(%n, %a_shared)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.dims import numel
from autopar.ir.graph import Node, Ref, Value
from autopar.passes.base import CONVERT, CONVERT_MANY, Context, Stage, kwarg, move_of, producers


@dataclass(slots=True)
class _Bucket:
    """Conversions that will stand where the first of them stands."""

    at: int
    members: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BucketConversions:
    """Joins communicating conversions of tensors of at most `small_bytes` each."""

    small_bytes: int = 1 << 20
    name: str = "bucket_conversions"

    def run(self, stage: Stage, context: Context) -> Stage:
        """Until nothing changes: a bucket on one axis brings what another axis converts next to one point."""
        buckets = [bucket for bucket in self._buckets(stage, context) if len(bucket.members) > 1]
        if not buckets:
            return stage
        return self.run(self._joined(stage, buckets), context)

    def _joined(self, stage: Stage, buckets: list[_Bucket]) -> Stage:
        nodes = stage.block.nodes
        joined = {bucket.at: self._join([nodes[index] for index in bucket.members]) for bucket in buckets}
        gone = {index for bucket in buckets for index in bucket.members}
        kept = [joined.get(index, node) for index, node in enumerate(nodes) if index in joined or index not in gone]
        return stage.with_nodes(kept)

    def _buckets(self, stage: Stage, context: Context) -> list[_Bucket]:
        made = producers(stage.block)
        values = stage.block.values()
        buckets: list[_Bucket] = []
        open_by_kind: dict[tuple[object, ...], list[_Bucket]] = {}
        for index, node in enumerate(stage.block.nodes):
            if node.op != CONVERT or not move_of(node, stage, context).communicates or not self._small(node, values, context):
                continue
            value = node.outputs[0]
            if value.name in stage.offload:  # by itself: results of one collective are pieces of one storage
                continue
            kind = (kwarg(node, "axis"), kwarg(node, "move"), value.dtype, value.differentiable, value.name in stage.again)
            candidates = open_by_kind.setdefault(kind, [])
            source = made[node.operands()[0]]
            bucket = next((each for each in candidates if source < each.at), None)
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
    def _join(members: list[Node]) -> Node:
        first = members[0]
        sources = tuple(Ref(node.operands()[0]) for node in members)
        outputs = tuple(node.outputs[0] for node in members)
        return Node(CONVERT_MANY, (sources,), first.kwargs, outputs, first.module, "", first.no_grad)
