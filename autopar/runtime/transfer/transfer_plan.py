"""The plan of a weight transfer: which rank sends which slice to whom, so that each receiver gets every element once, in rounds
whose buffers fit into the given memory; and the lower bounds of its bytes and its seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..errors import TransferProblem
from .weight_layout import Span, Spans, TensorLayout, WeightLayout, cut

Overlap = tuple[int, int, int]
"""Positions along a dimension: the first in the sender's tensor, the first in the receiver's, and their number."""


class TensorSlice(NamedTuple):
    """A part of a tensor that one rank sends to another: the product of the overlaps of each dimension."""

    name: str
    overlaps: tuple[tuple[Overlap, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in which it travels."""
        return tuple(sum(length for *_, length in each) for each in self.overlaps)

    def divide(self, most: int) -> Iterator[TensorSlice]:
        """Yield slices of at most `most` elements (one at least), which together are this one."""
        shape = self.shape
        if prod(shape) <= most or not shape:
            yield self
            return
        dim = next(dim for dim, extent in enumerate(shape) if extent > 1)
        step = max(1, most // prod(shape[dim + 1 :]))
        for start in range(0, shape[dim], step):
            inside = tuple(cut(self.overlaps[dim], start, start + step))
            yield from TensorSlice(self.name, (*self.overlaps[:dim], inside, *self.overlaps[dim + 1 :])).divide(most)


class Send(NamedTuple):
    """A slice on its way: the ranks are those of each job."""

    source: int
    target: int
    part: TensorSlice
    nbytes: int


@dataclass(frozen=True)
class TransferPlan:
    """The rounds of a transfer, in which each rank takes at most `memory_bytes` for what it sends or receives. `busiest_bytes`:
    no transfer has fewer bytes over the link of its busiest rank. `sizes`: ranks of the job that sends, of the one that
    receives."""

    rounds: tuple[tuple[Send, ...], ...]
    sizes: tuple[int, int]
    memory_bytes: int
    lower_bound_bytes: int
    busiest_bytes: int

    @property
    def nbytes(self) -> int:
        """The bytes between ranks: `lower_bound_bytes`, which is what the receivers lack."""
        return sum(send.nbytes for each in self.rounds for send in each)

    def seconds(self, bytes_per_second: float) -> float:
        """Return the seconds of the rounds one after another, over one link of each rank that sends and receives at once."""
        return sum(max(_loads(each).values()) for each in self.rounds) / bytes_per_second

    def lower_bound_seconds(self, bytes_per_second: float) -> float:
        """Return seconds that no transfer over such links is faster than."""
        return self.busiest_bytes / bytes_per_second

    def __str__(self) -> str:
        peak = max((load for each in self.rounds for load in _loads(each).values()), default=0)
        busiest = max(_loads([send for each in self.rounds for send in each]).values(), default=0)
        return (
            f"{self.nbytes:,} bytes from {self.sizes[0]} to {self.sizes[1]} ranks (lower bound {self.lower_bound_bytes:,}) in "
            f"{len(self.rounds)} rounds with buffers of at most {peak:,} bytes; the busiest rank has {busiest:,} of them "
            f"(lower bound {self.busiest_bytes:,})"
        )


def _loads(sends: Iterable[Send]) -> Mapping[tuple[bool, int], int]:
    """Return the bytes of each rank that sends (True, rank) or receives."""
    out: dict[tuple[bool, int], int] = defaultdict(int)
    for send in sends:
        out[True, send.source] += send.nbytes
        out[False, send.target] += send.nbytes
    return out


def plan_transfer(
    source: WeightLayout, target: WeightLayout, memory_bytes: int, hosts: tuple[Sequence[str], Sequence[str]] = ((), ())
) -> TransferPlan:
    """Return the plan. Of the ranks that hold a slice one on the receiver's host sends it, where `hosts` (of the ranks of both
    jobs) are known, and else that which has the least to send. TransferProblem where the layouts are not of the same tensors."""
    _check_same(source, target)
    if type(memory_bytes) is not int or memory_bytes < 64:
        raise TransferProblem(f"memory_bytes={memory_bytes!r} is no memory for buffers: pass 2**20 or more")
    wanted = sorted(_wanted(source, target, memory_bytes // 4), key=lambda each: (len(each[0]), -each[3]))
    load: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    alone: dict[tuple[int, ...], int] = defaultdict(int)
    sends = []
    for holders, receiver, part, nbytes in wanted:
        near = [rank for rank in holders if hosts[0] and hosts[0][rank] == hosts[1][receiver]] or holders
        sender = min(near, key=lambda rank: (load[rank], rank))
        load[sender] += nbytes
        sends.append(Send(sender, receiver, part, nbytes))
        received[receiver] += nbytes
        alone[holders] += nbytes
    busiest = max([*received.values(), *(-(-count // len(holders)) for holders, count in alone.items())], default=0)
    busiest = max(busiest, -(-sum(alone.values()) // source.size))
    return TransferPlan(_rounds(sends, memory_bytes), (source.size, target.size), memory_bytes, _lacking(target), busiest)


def _lacking(target: WeightLayout) -> int:
    """Return the bytes of all shards of all receivers."""
    ranks = {tensor: _ranks_by_spans(target, tensor) for tensor in set(target.tensors.values())}
    sizes = {tensor: sum(len(each) * _elements(spans) for spans, each in by.items()) for tensor, by in ranks.items()}
    return sum(sizes[tensor] * tensor.itemsize for tensor in target.tensors.values())


def _elements(spans: Spans) -> int:
    return prod(sum(length for _, length in each) for each in spans)


def _check_same(source: WeightLayout, target: WeightLayout) -> None:
    for name in (*source.tensors, *target.tensors):
        if name not in target.tensors and source.tensors[name].buffer:
            continue
        if name not in target.tensors or name not in source.tensors:
            here, there = ("sends", "receives") if name in source.tensors else ("receives", "sends")
            raise TransferProblem(
                f"the job that {here} has {name}, and the one that {there} has not: build the same model in both jobs"
            )
        own, other = source.tensors[name], target.tensors[name]
        if own.shape != other.shape:
            raise TransferProblem(
                f"{name} has shape {own.shape} where it is sent, and {other.shape} where it is received: build the same model"
            )
        if own.dtype != other.dtype:
            raise TransferProblem(
                f"{name} is {own.dtype} where it is sent, and {other.dtype} where it is received: pass "
                f"send_weights(dtype=torch.{other.dtype}), which converts it before it is sent"
            )


Wanted = tuple[tuple[int, ...], int, TensorSlice, int]
"""The ranks that hold a slice, the rank that receives it, the slice, its bytes."""


def _wanted(source: WeightLayout, target: WeightLayout, most_bytes: int) -> Iterator[Wanted]:
    """Yield the slices of every receiver's shards."""
    known: dict[tuple[TensorLayout, TensorLayout], list[tuple[tuple[int, ...], list[int], tuple[tuple[Overlap, ...], ...]]]] = {}
    for name in target.tensors:
        tensor, other = source.tensors[name], target.tensors[name]._replace(fused="")
        if (tensor, other) not in known:  # layers are alike
            known[tensor, other] = [
                (tuple(holders), receivers, overlaps)
                for spans, receivers in _ranks_by_spans(target, other).items()
                for own, holders in _ranks_by_spans(source, tensor).items()
                if all(overlaps := tuple(_overlaps(a, b) for a, b in zip(own, spans, strict=True)))
            ]
        for holders, receivers, overlaps in known[tensor, other]:
            for part in TensorSlice(name, overlaps).divide(max(1, most_bytes // tensor.itemsize)):
                yield from ((holders, receiver, part, prod(part.shape) * tensor.itemsize) for receiver in receivers)


def _ranks_by_spans(layout: WeightLayout, tensor: TensorLayout) -> dict[Spans, list[int]]:
    out: dict[Spans, list[int]] = defaultdict(list)
    for rank in range(layout.size):
        spans = layout.spans(tensor, rank)
        if spans is not None:
            out[spans].append(rank)
    return out


def _overlaps(source: Sequence[Span], target: Sequence[Span]) -> tuple[Overlap, ...]:
    """Return the positions that both have, in the order of the receiver's."""
    out, end = [], 0
    for start, length in target:
        begin = 0
        for other, count in source:
            low, high = max(start, other), min(start + length, other + count)
            if low < high:
                out.append((begin + low - other, end + low - start, high - low))
            begin += count
        end += length
    return tuple(out)


def _rounds(sends: Sequence[Send], memory_bytes: int) -> tuple[tuple[Send, ...], ...]:
    """Return the sends in the first rounds in which both ranks have the memory, the largest first."""
    rounds: list[list[Send]] = []
    filled: list[dict[tuple[bool, int], int]] = []
    first: dict[tuple[bool, int], int] = defaultdict(int)
    least = min((send.nbytes for send in sends), default=0)
    for send in sorted(sends, key=lambda each: -each.nbytes):
        ends = ((True, send.source), (False, send.target))
        number = max(first[each] for each in ends)
        while number < len(rounds) and any(filled[number][each] + send.nbytes > memory_bytes for each in ends):
            number += 1
        if number == len(rounds):
            rounds.append([])
            filled.append(defaultdict(int))
        rounds[number].append(send)
        for each in ends:
            filled[number][each] += send.nbytes
            while first[each] < len(rounds) and filled[first[each]][each] + least > memory_bytes:
                first[each] += 1
    return tuple(map(tuple, rounds))
