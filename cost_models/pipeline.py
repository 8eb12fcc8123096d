"""Pipelines: which calls a stage runs, in which order, how many micro-batches it holds, and the clock of a whole schedule.

GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2.1) and 1F1B over
several chunks a stage (interleaved; the same, section 2.2.2). A *chunk* is a run of consecutive calls; chunk c of p * v is on
stage c mod p. The names are those of ``torch.distributed.pipelining``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from re import compile as pattern

from autopar.cost_models.formulas import formula
from autopar.cost_models.hardware import Cluster
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Pipeline

SCHEDULES = ("1f1b", "gpipe")
_NUMBER = pattern(r"^(.*?(?:^|\.)\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Action:
    """One micro-batch through one chunk (in the model's order), forward or backward."""

    chunk: int
    micro_batch: int
    backward: bool = False

    def __str__(self) -> str:
        return f"{self.chunk}{'B' if self.backward else 'F'}{self.micro_batch}"


def stage_calls(graph: Graph, pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """The calls (indices of `graph.calls`) of every chunk, in the model's order: chunk c runs on stage ``c % stages``.

    Layers are dealt evenly. Where that does not go up, the last chunk gets one less (it has the head), then the first (the
    embedding), then the next ones inwards: 126 layers on 16 stages are 7, 8, ..., 8, 7. What precedes the first layer goes to the
    first chunk, everything else to the layer before it. Where layers lack, the head is a chunk by itself, and then the embedding
    (Megatron's ``account_for_loss_in_pipeline_split`` and ``account_for_embedding_in_pipeline_split``): 94 layers make 96 chunks.
    PlanError where that does not suffice. `pipeline.layers` says it otherwise.
    """
    parts = pipeline.stages * pipeline.virtual
    before, layers, after = _layers(graph)
    if pipeline.layers and (len(pipeline.layers) != parts or sum(pipeline.layers) != len(layers) or min(pipeline.layers) < 1):
        raise PlanError(f"the pipeline's layers {pipeline.layers} are not {len(layers)} layers in {parts} chunks")
    if len(layers) + bool(before) + bool(after) < parts:
        raise PlanError(
            f"{graph.name} has {len(layers)} layers, {pipeline.stages} stages of {pipeline.virtual} chunks need {parts}: "
            "take fewer stages"
        )
    missing = max(0, parts - len(layers))
    head_alone = bool(missing and after)
    embedding_alone = missing > head_alone
    sizes = list(pipeline.layers) or [len(layers) // (parts - missing) + 1] * (parts - missing)
    for place in () if pipeline.layers else _ends_first(len(sizes))[: len(sizes) - len(layers) % len(sizes)]:
        sizes[place] -= 1
    ends = list(accumulate(sizes))
    out = [[index for layer in layers[end - size : end] for index in layer] for size, end in zip(sizes, ends, strict=True)]
    if not embedding_alone:
        out[0] = before + out[0]
    if not head_alone:
        out[-1] = out[-1] + after
    return tuple(map(tuple, [before] * embedding_alone + out + [after] * head_alone))


def _ends_first(count: int) -> list[int]:
    """Last, first, last but one, second ..."""
    return [count - 1 - place // 2 if place % 2 == 0 else place // 2 for place in range(count)]


def _layers(graph: Graph) -> tuple[list[int], list[list[int]], list[int]]:
    """The calls before the first layer, those of each layer with what follows it before the next, and those behind the last.

    Calls of one numbered module (``model.layers.3``, also its parts) are one layer; without numbers each call is one.
    """
    found = [_NUMBER.match(call.prefix) for call in graph.calls]
    names = [match[1] if match else "" for match in found]
    if len({name for name in names if name}) < 2:
        return [], [[index] for index in range(len(graph.calls))], []
    first = next(index for index, name in enumerate(names) if name)
    end = len(names) - next(index for index, name in enumerate(reversed(names)) if name)
    layers: list[list[int]] = []
    current = ""
    for index in range(first, end):
        if names[index] and names[index] != current:
            layers.append([])
            current = names[index]
        layers[-1].append(index)
    return list(range(first)), layers, list(range(end, len(names)))


def chunks_of(pipeline: Pipeline, stage: int) -> range:
    """The chunks of a stage, in the model's order."""
    return range(stage, pipeline.stages * pipeline.virtual, pipeline.stages)


def part_of(cluster: Cluster, stages: int) -> Cluster:
    """The devices of one of `stages` equal neighbouring parts, on the same links. PlanError where they do not divide."""
    if stages == 1:
        return cluster
    if cluster.size % stages:
        raise PlanError(f"{cluster.name} has {cluster.size} devices, which {stages} pipeline stages do not divide")
    return replace(cluster, size=cluster.size // stages)


def check_schedule(pipeline: Pipeline, micro_batches: int) -> None:
    """PlanError where there is no such schedule. Interleaving takes whole groups of p micro-batches (or fewer than p in all):
    with a smaller last group the stages would wait for each other for ever."""
    if pipeline.schedule not in SCHEDULES:
        raise PlanError(f"no schedule {pipeline.schedule!r}: write {' or '.join(SCHEDULES)}")
    p = pipeline.stages
    if pipeline.schedule == "1f1b" and pipeline.virtual > 1 and micro_batches > p and micro_batches % p:
        raise PlanError(f"{pipeline.virtual} chunks a stage take a multiple of {p} micro-batches (stages), not {micro_batches}")


@lru_cache(maxsize=256)
def actions(pipeline: Pipeline, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """What a stage runs, in order.

    1F1B: stage s runs ``p - s - 1`` forwards ahead, then one forward and one backward in turn. With v chunks micro-batches go in
    groups of p through the chunks, and ``2 (p - s - 1) + (v - 1) p`` run ahead. GPipe: all forwards, then all backwards.
    """
    check_schedule(pipeline, micro_batches)
    p, v, mine = pipeline.stages, pipeline.virtual, chunks_of(pipeline, stage)
    groups = [range(at, min(at + p, micro_batches)) for at in range(0, micro_batches, p)] if v > 1 else [range(micro_batches)]
    if pipeline.schedule == "gpipe":
        groups = [range(micro_batches)]
    forward = [Action(chunk, micro) for group in groups for chunk in mine for micro in group]
    backward = [Action(chunk, micro, True) for group in groups for chunk in reversed(mine) for micro in group]
    total = len(forward)
    ahead = total if pipeline.schedule == "gpipe" else min(total, _ahead(pipeline, stage, micro_batches))
    pairs = zip(forward[ahead:], backward, strict=False)
    return (*forward[:ahead], *(each for pair in pairs for each in pair), *backward[total - ahead :])


def in_flight(pipeline: Pipeline, stage: int, micro_batches: int) -> int:
    """The most (micro-batch, chunk) pairs whose activations `stage` holds at once. 1F1B: ``min(m, p - s)``; GPipe: ``m v``;
    interleaved: ``min(m v, 2 (p - s - 1) + (v - 1) p + 1)``."""
    total = micro_batches * pipeline.virtual
    return total if pipeline.schedule == "gpipe" else min(total, _ahead(pipeline, stage, micro_batches) + 1)


def held(pipeline: Pipeline, stage: int, micro_batches: int, kept_bytes: Sequence[float]) -> tuple[int, ...]:
    """Per chunk of `stage`, how many micro-batches it holds when the stage holds most; `kept_bytes`: what one micro-batch
    keeps in each. Interleaved, the last chunk holds one where the others hold p: the mean would hold its logits several times."""
    if pipeline.virtual == 1:
        return (in_flight(pipeline, stage, micro_batches),)
    p = pipeline.stages
    few = min(micro_batches, 4 * p) if pipeline.schedule != "gpipe" else micro_batches  # groups of p: then it repeats
    place = {chunk: index for index, chunk in enumerate(chunks_of(pipeline, stage))}
    counts, most = [0] * len(place), 0.0
    best = tuple(counts)
    for action in actions(pipeline, stage, few):
        counts[place[action.chunk]] += -1 if action.backward else 1
        total = sum(count * size for count, size in zip(counts, kept_bytes, strict=True))
        if total > most:
            best, most = tuple(counts), total
    return best


def _ahead(pipeline: Pipeline, stage: int, micro_batches: int) -> int:
    """Forwards that a stage runs before its first backward, where there are so many."""
    name = "pipeline.ahead" if pipeline.virtual == 1 else "pipeline.ahead.interleaved"
    return int(formula(name).function(pipeline.stages, pipeline.virtual, micro_batches, stage))


@dataclass(frozen=True, slots=True)
class ChunkSeconds:
    """One micro-batch through a chunk. The first and the last one of a step differ (weights are gathered, gradients reduced)."""

    forward: float
    backward: float
    first_forward: float | None = None
    last_backward: float | None = None

    def of(self, action: Action, micro_batches: int) -> float:
        special = self.last_backward if action.backward else self.first_forward
        at_end = action.micro_batch == (micro_batches - 1 if action.backward else 0)
        return special if special is not None and at_end else self.backward if action.backward else self.forward


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """One stage on the schedule's clock. `busy_seconds` runs actions (and sends, where that blocks), `end_seconds` is when the
    last one ends; the rest of it is the bubble."""

    busy_seconds: float
    end_seconds: float

    @property
    def bubble_seconds(self) -> float:
        return self.end_seconds - self.busy_seconds


def run_schedule(
    pipeline: Pipeline,
    micro_batches: int,
    chunks: Sequence[ChunkSeconds],
    transfer_seconds: Sequence[float] = (),
    blocking: bool = False,
) -> tuple[StageSeconds, ...]:
    """Runs a schedule: an action begins when its stage is free and its input has arrived. The makespan is the largest end.

    `transfer_seconds[c]` is one transfer between chunks c and c + 1, the same both ways; with `blocking` the sender does nothing
    else meanwhile. Many micro-batches are not walked one by one: the clock of a fixed order of actions is periodic after a
    start (max-plus algebra: Baccelli et al., Synchronization and Linearity, theorem 3.109), so two periods that agree
    stand for all others.
    """
    transfers = tuple(transfer_seconds) or (0.0,) * (len(chunks) - 1)
    period = pipeline.stages
    start = 4 * period + micro_batches % period
    if micro_batches <= start + 3 * period or pipeline.schedule == "gpipe":
        return _walk(pipeline, micro_batches, chunks, transfers, blocking)
    some = [_walk(pipeline, start + extra * period, chunks, transfers, blocking) for extra in range(3)]
    more, again = _growth(some[0], some[1]), _growth(some[1], some[2])
    if any(abs(a - b) > 1e-9 * max(a, b) for x, y in zip(more, again, strict=True) for a, b in zip(x, y, strict=True)):
        return _walk(pipeline, micro_batches, chunks, transfers, blocking)
    times = (micro_batches - start) // period
    return tuple(
        StageSeconds(stage.busy_seconds + times * busy, stage.end_seconds + times * end)
        for stage, (busy, end) in zip(some[0], more, strict=True)
    )


def _growth(before: Sequence[StageSeconds], after: Sequence[StageSeconds]) -> list[tuple[float, float]]:
    """What a period adds to each stage: (busy, end)."""
    pairs = zip(before, after, strict=True)
    return [(two.busy_seconds - one.busy_seconds, two.end_seconds - one.end_seconds) for one, two in pairs]


def _walk(
    pipeline: Pipeline, micro_batches: int, chunks: Sequence[ChunkSeconds], transfers: Sequence[float], blocking: bool
) -> tuple[StageSeconds, ...]:
    """Every action once, in any order that the dependencies allow."""
    p, last = pipeline.stages, len(chunks) - 1
    orders = [actions(pipeline, stage, micro_batches) for stage in range(p)]
    place, free, busy, ended = [0] * p, [0.0] * p, [0.0] * p, [0.0] * p
    arrived: dict[tuple[int, int, bool], float] = {(0, micro, False): 0.0 for micro in range(micro_batches)}
    waiting: dict[tuple[int, int, bool], int] = {}
    ready = list(range(p))
    while ready:
        stage = ready.pop()
        while place[stage] < len(orders[stage]):
            action = orders[stage][place[stage]]
            key = action.chunk, action.micro_batch, action.backward
            if key not in arrived:
                waiting[key] = stage
                break
            place[stage] += 1
            seconds = chunks[action.chunk].of(action, micro_batches)
            end = max(free[stage], arrived.pop(key)) + seconds
            after = _next(action, last)
            sent = 0.0 if after is None or after[0] == action.chunk else transfers[min(after[0], action.chunk)]
            free[stage] = end + (sent if blocking else 0.0)
            busy[stage] += seconds + (sent if blocking else 0.0)
            ended[stage] = free[stage]
            if after is not None:
                arrived[after] = end + sent
                if after in waiting:
                    ready.append(waiting.pop(after))
    left = [f"stage {stage} at {orders[stage][place[stage]]}" for stage in range(p) if place[stage] < len(orders[stage])]
    if left:
        raise PlanError(f"the schedule {pipeline.schedule} of {micro_batches} micro-batches stands still: {', '.join(left)}")
    return tuple(StageSeconds(spent, end) for spent, end in zip(busy, ended, strict=True))


def _next(action: Action, last: int) -> tuple[int, int, bool] | None:
    """What the result of an action is for."""
    chunk, micro = action.chunk, action.micro_batch
    if not action.backward:
        return (chunk + 1, micro, False) if chunk < last else (chunk, micro, True)
    return (chunk - 1, micro, True) if chunk else None
