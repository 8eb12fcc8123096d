"""Odd models in pipelines: parameters in many places, frozen stages, whole numbers and masks on boundaries, hard names."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.harness.end_to_end import Prepared
from support.harness.rank_pool import RankPool
from support.harness.training_loop import graph_state
from support.harness.training_script import Batch, Job, Record, batches, check_jobs, on_one_process, steps
from support.models.small_models import VOCABULARY, token_batch
from support.plans.pipeline_plans import candidate_text, pipeline_candidate
from torch import Tensor, nn

from autopar.capture import capture
from autopar.ir.plan import Pipeline


class OddLayer(nn.Module):
    """Reads a mask, whole numbers, and a 0-d tensor; its projection back is the word table; a buffer is the same everywhere."""

    def __init__(self, width: int, words: nn.Parameter, shared: Tensor) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.words = words
        self.register_buffer("shared", shared)

    def forward(self, x: Tensor, mask: Tensor, places: Tensor, warmth: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.norm(x)) * warmth)) + self.frozen(x) * self.shared
        y = torch.where(mask, y, 0.0) + F.embedding(places, self.words) * 0.1
        return x + y * self.scale


class Odd(nn.Module):
    """Its word table is used by every layer and the head; several tensors go from layer to layer, some of them whole numbers."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.heat = nn.Parameter(torch.tensor(0.3))
        self.unused = nn.Parameter(torch.ones(3))
        shared = torch.rand(width)
        self.layers = nn.ModuleList(OddLayer(width, self.words.weight, shared) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        x = start = self.words(input_ids)
        mask, places = (input_ids > 3)[..., None], (input_ids * 7) % 5
        warmth = self.heat.exp()
        for layer in self.layers:
            x = layer(x, mask, places, warmth)
        return F.cross_entropy(self.head(x + 0.1 * start).flatten(0, 1), labels.flatten())


class Frozen(nn.Module):
    """Layers of which some train: `first` to `last`."""

    def __init__(self, first: int, last: int, ends: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        for number, layer in enumerate(self.layers):
            layer.requires_grad_(first <= number < last)
        self.words.requires_grad_(ends)
        self.head.requires_grad_(ends)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Weighted(nn.Module):
    """Weights of tokens over their sum in the batch, made before the layers and read after them: a total of all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        known = (input_ids > 3).to(self.head.weight.dtype)
        weights = known / known.sum()
        x = self.words(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none")
        return (losses * weights.flatten()).sum()


class Normal(nn.Module):
    """Layers with batch norm, whose buffers the forward writes: exact in one micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16)) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids).mean(1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return F.cross_entropy(self.head(x), labels[:, -1])


@cache
def odd(kind: str) -> tuple[Prepared, Record]:
    """Captured, and three steps on one process."""
    torch.manual_seed(1)
    model = {
        "odd": Odd,
        "first": lambda: Frozen(2, 4, False),
        "middle": lambda: Frozen(0, 1, True),
        "last": lambda: Frozen(0, 2, False),
        "head": lambda: Frozen(4, 4, True),
        "named": Named,
        "bn": Normal,
        "weighted": Weighted,
    }[kind]().double()
    given = named() if kind == "named" else token_batch(16)
    graph = capture(model, (), given)
    case = Prepared(kind, graph, graph_state(graph, model), given, (0.0, {}, {}, {}))
    return case, on_one_process(model, steps(3), batches(given))


def strange(kind: str, pipeline: Pipeline, many: int = 4, repeated: bool = False, **force: int) -> Job:
    case, expected = odd(kind)
    candidate = pipeline_candidate(case, force, pipeline, many)
    if not repeated:
        candidate = replace(candidate, pipeline=replace(candidate.pipeline, repeated=()))
    title = f"{kind} {pipeline.schedule} {pipeline.virtual} {many} {repeated} {force}"
    return Job(title, candidate_text(case, candidate), case.state, steps(3), batches(case.batch), expected)


@pytest.mark.slow
def test_odd_models(ranks: RankPool) -> None:
    check_jobs(
        [
            strange("odd", Pipeline(2)),
            strange("odd", Pipeline(2, 2, "zbv")),
            strange("odd", Pipeline(2, 1, "zb-h1"), repeated=True),
            *(
                strange(kind, Pipeline(2, 1, schedule))
                for kind, schedule in zip(("first", "middle", "last", "head"), ("1f1b", "zb-h1", "gpipe", "zb-h1"), strict=True)
            ),
        ],
        ranks,
        2,
    )


def test_values_made_of_a_total_over_micro_batches(ranks: RankPool) -> None:
    """Sent to the last stage, and computed there again (TimeSeriesTransformer's scale ended in a stack)."""
    check_jobs([strange("weighted", Pipeline(2), repeated=repeated) for repeated in (False, True)], ranks, 2)


def test_a_stage_that_the_next_one_repeats(ranks: RankPool) -> None:
    """It is frozen, and its results are cheaper to compute again than to send: nothing is on the boundary."""
    job = strange("first", Pipeline(2), repeated=True)
    assert "boundaries = (  # sent from each chunk to the next\n        (),\n    )" in job.text
    check_jobs([job], ranks, 2)


@pytest.mark.slow
def test_odd_models_with_data(ranks: RankPool) -> None:
    check_jobs(
        [strange("odd", Pipeline(2, 2 if zero % 2 else 1, "zbv" if zero % 2 else "1f1b"), dp=2, zero=zero) for zero in range(4)]
        + [
            strange("odd", Pipeline(2, 2, "zbv"), dp=2, zero=2),
            strange("first", Pipeline(2, 1, "zb-h1"), dp=2, zero=3),
            strange("middle", Pipeline(2), dp=2, zero=2),
            strange("head", Pipeline(2), dp=2, zero=3),
        ],
        ranks,
        4,
    )


class NamedLayer(nn.Module):
    """Reads inputs of the batch itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight_grads, self.actions = nn.Linear(width, width), nn.LayerNorm(width)
        self.split_backward = nn.Parameter(torch.rand(width))
        self.register_buffer("position", torch.rand(width))

    def forward(self, hidden: Tensor, schedule: Tensor, own_chunks: Tensor) -> Tensor:
        return (
            hidden
            + torch.tanh(self.weight_grads(self.actions(hidden)) * self.split_backward + schedule[:, None, None])
            * own_chunks[..., None]
            + self.position
        )


class Named(nn.Module):
    """Inputs, modules and parameters that have names of the runtime; one input is for the second stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks = nn.Embedding(VOCABULARY, 16)
        self.chunk_stages = nn.ModuleList(NamedLayer(16) for _ in range(4))
        self.all_chunks = nn.Linear(16, VOCABULARY)

    def forward(
        self, micro_batch_size: Tensor, batch_inputs: Tensor, schedule: Tensor, own_chunks: Tensor, count_valid: Tensor
    ) -> Tensor:
        hidden = self.chunks(micro_batch_size)
        for number, owner in enumerate(self.chunk_stages):
            hidden = owner(hidden, schedule if number > 1 else -schedule, own_chunks)
        found = (self.all_chunks(hidden) - batch_inputs[..., None] * 0.01) ** 2
        return (found.mean(-1) * count_valid).mean()


def named(batch: int = 16) -> Batch:
    given = token_batch(batch)
    return {
        "micro_batch_size": given["input_ids"],
        "batch_inputs": given["input_ids"].roll(1),
        "schedule": torch.rand(batch).double(),
        "own_chunks": torch.rand(given["labels"].shape).double(),
        "count_valid": torch.rand(given["labels"].shape).double(),
    }


def mixed(kind: str, pipeline: Pipeline, zeros: tuple[int, ...]) -> Job:
    """Two data ranks; each block shards its state in its own way."""
    case, expected = odd(kind)
    plain = pipeline_candidate(case, {"dp": 2}, pipeline, 4)
    blocks = tuple(replace(block, zero=zeros[index % len(zeros)]) for index, block in enumerate(plain.blocks))
    text = candidate_text(case, replace(plain, blocks=blocks))
    return Job(f"{kind} {pipeline.schedule} {zeros}", text, case.state, steps(3), batches(case.batch), expected)


def test_names_of_the_runtime(ranks: RankPool) -> None:
    check_jobs(
        [
            strange("named", Pipeline(2)),
            strange("named", Pipeline(2, 2, "zbv")),
            strange("named", Pipeline(2, 1, "zb-h1"), repeated=True),
            strange("bn", Pipeline(2), 1),
            strange("bn", Pipeline(2, 1, "zb-h1"), 1),
        ],
        ranks,
        2,
    )


@pytest.mark.slow
def test_blocks_that_shard_in_their_own_ways(ranks: RankPool) -> None:
    check_jobs(
        [
            mixed("odd", pipeline, zeros)
            for pipeline, zeros in product(
                (Pipeline(2), Pipeline(2, 2, "zbv")), ((0, 3, 0), (3, 0, 0), (0, 0, 3), (1, 3, 2), (3, 1, 0))
            )
        ],
        ranks,
        4,
    )
