"""Batches by length (`parallel.sampler(dataset, lengths=...)`): few programs, the fewest padded tokens, global batches that do
not depend on the ranks, and losses that equal one process."""

from __future__ import annotations

import logging
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.comparison import same_gradients
from support.harness.rank_pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

import autopar
from autopar.runtime.data.epoch_sampler import checked_lengths
from autopar.runtime.data.length_sampler import LengthBatchSampler, length_edges
from autopar.runtime.errors import MismatchProblem, RuntimeProblem, StateError

WORDS = 32
LENGTHS = [5, 9, 12, 3, 7, 8, 8, 2]


def natural_lengths(count: int, *, median: int = 60, most: int = 256) -> Tensor:
    """Lengths drawn from a log-normal distribution (as those of instructions and answers are), and cut at `most`."""
    drawn = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(0)) * 0.9) * median
    return drawn.long().clamp(1, most)


def padded_tokens(lengths: list[int], edges: tuple[int, ...]) -> int:
    return sum(min(edge for edge in edges if edge >= length) for length in lengths)


# -- the edges


def fewest_by_search(lengths: list[int], most: int, multiple: int, fewest: int) -> int:
    """The fewest padded tokens of all sets of edges."""
    sizes = sorted({-(-length // multiple) * multiple for length in lengths})
    totals = []
    for count in range(min(most, len(sizes))):
        for below in combinations(sizes[:-1], count):
            edges = (*below, sizes[-1])
            counts = [sum(low < length <= edge for length in lengths) for low, edge in zip((0, *below), edges, strict=True)]
            if min(counts) >= fewest:
                totals.append(padded_tokens(lengths, edges))
    return min(totals)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 40) | st.integers(1, 400), min_size=6, max_size=25),
    st.integers(1, 4), st.sampled_from((1, 2, 8, 24)), st.integers(1, 6),
)  # fmt: skip
def test_no_other_edges_pad_less(lengths: list[int], most: int, multiple: int, fewest: int) -> None:
    edges = length_edges(torch.tensor(lengths), most, multiple, fewest)
    assert len(edges) <= most and list(edges) == sorted(set(edges)) and not any(edge % multiple for edge in edges)
    assert padded_tokens(lengths, edges) == fewest_by_search(lengths, most, multiple, fewest)
    buckets = torch.bucketize(torch.tensor(lengths), torch.tensor(edges)).bincount(minlength=len(edges))
    assert buckets.min() >= fewest


def test_many_lengths_are_no_work() -> None:
    """Samples of audio: 200,000 distinct lengths, which a quadratic program would take minutes for."""
    lengths = torch.randperm(200_000) + 1
    assert length_edges(lengths, 4, 1, 64) == (50_000, 100_000, 150_000, 200_000)


def test_edges_stop_where_more_save_nothing() -> None:
    assert length_edges(torch.tensor([7, 8, 16, 15] * 8), 5, 8, 4) == (8, 16)


# -- the batches


def epoch_of(lengths: Tensor, ranks: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """The batches of each rank."""
    samplers = [LengthBatchSampler(lengths, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 300), min_size=24, max_size=120), st.sampled_from((12, 24)), st.integers(0, 3),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_global_batches_do_not_depend_on_the_ranks(
    lengths: list[int], batch_size: int, epoch: int, drop_last: bool, shuffle: bool
) -> None:
    sizes = torch.tensor(lengths)
    options: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle, "seed": 5}
    alone = LengthBatchSampler(sizes, **options)
    alone.set_epoch(epoch)
    expected = [sorted(batch) for batch in alone]
    assert len(expected) == len(alone) and [sorted(batch.tolist()) for batch in alone.global_batches()] == expected
    examples = [example for batch in expected for example in batch]
    assert len(set(examples)) == len(examples) if drop_last else set(examples) == set(range(len(lengths)))
    for batch in expected:
        assert len({alone.padded_length(lengths[example]) for example in batch}) == 1
        assert len(batch) == batch_size
    for ranks in (2, 3, 4, 12):
        shares = epoch_of(sizes, ranks, epoch, **options)
        assert [sorted(sum(parts, [])) for parts in zip(*shares, strict=True)] == expected
        for parts in zip(*shares, strict=True):
            assert {len(part) for part in parts} == {batch_size // ranks}
            sums = [sum(lengths[example] for example in part) for part in parts]
            own = [lengths[example] for part in parts for example in part]
            assert max(sums) - min(sums) <= max(own) - min(own)


def test_shares_of_ranks_are_close() -> None:
    """The longest share is 1 % longer than the shortest: it is 12 % where examples are dealt out at random, 5 % without the way
    back."""
    lengths = natural_lengths(10_000)
    sums = torch.tensor([[int(lengths[part].sum()) for part in parts] for parts in epoch_of(lengths, 4, batch_size=32)])
    spread = (sums.amax(0) - sums.amin(0)).double().mean() / sums.double().mean()
    assert spread < 0.02


def test_epochs_differ_and_repeat() -> None:
    lengths = natural_lengths(400)
    first, second, again = (epoch_of(lengths, 2, epoch, batch_size=8) for epoch in (0, 1, 0))
    assert first == again != second
    assert epoch_of(lengths, 2, batch_size=8, seed=1) != first
    widths = [int(lengths[batch].max()) for batch in first[0]]
    assert widths != sorted(widths), "buckets come mixed"
    seen = {example for epoch in range(40) for batch in epoch_of(lengths, 1, epoch, batch_size=8)[0] for example in batch}
    assert len(seen) == 400, "no example is left out of every epoch"


def test_resumed_epochs_go_on() -> None:
    lengths = natural_lengths(300)
    whole = LengthBatchSampler(lengths, batch_size=12, rank=1, num_replicas=2)
    whole.set_epoch(3)
    expected, batches = list(whole), iter(whole)
    assert [next(batches) for _ in range(5)] == expected[:5]
    state = whole.state_dict()
    assert (state["epoch"], state["yielded"]) == (3, 5)
    resumed = LengthBatchSampler(lengths, batch_size=12, rank=1, num_replicas=2)
    resumed.load_state_dict(state)
    for epoch in range(resumed.epoch, 5):
        resumed.set_epoch(epoch)
        found = list(resumed)
        whole.set_epoch(epoch)
        assert found == (expected[5:] if epoch == 3 else list(whole))
    four = [LengthBatchSampler(lengths, batch_size=12, rank=rank, num_replicas=4) for rank in range(4)]
    for sampler in four:
        sampler.load_state_dict(state)
    resumed.set_epoch(3)
    rest = resumed.global_batches()[5:]
    parts = zip(*four, strict=True)
    assert [sorted(sum(each, [])) for each in parts] == [sorted(batch.tolist()) for batch in rest], "on other ranks too"
    with pytest.raises(StateError, match="saved with batch_size=12, and has batch_size=24, which draws other batches"):
        LengthBatchSampler(lengths, batch_size=24).load_state_dict(state)
    with pytest.raises(StateError, match="saved with lengths_checksum="):
        LengthBatchSampler(lengths.flip(0), batch_size=12).load_state_dict(state)


@pytest.mark.parametrize("yielded", [26, -1, 2.5, None])
def test_a_place_beyond_the_epoch_is_refused(yielded: Any) -> None:
    """The steps of all epochs in the place of those of this one: nothing would be left of it."""
    sampler = LengthBatchSampler(natural_lengths(300), batch_size=12)
    assert len(sampler) < 26
    with pytest.raises(StateError, match="count the batches of that epoch alone"):
        sampler.load_state_dict({**sampler.state_dict(), "yielded": yielded})
    with pytest.raises(StateError, match="not the state of a sampler by length"):
        sampler.load_state_dict({"epoch": 1})
    sampler.load_state_dict({**sampler.state_dict(), "yielded": torch.tensor(len(sampler))})
    assert list(sampler) == []


@pytest.mark.parametrize(
    "given",
    [
        *(np.array(LENGTHS, dtype) for dtype in ("uint16", "uint32", "uint64", ">i4", "object")),
        *(np.array(LENGTHS[::-1])[::-1], torch.tensor(LENGTHS, dtype=torch.uint16), map(np.uint16, LENGTHS), iter(LENGTHS)),
    ],
    ids=lambda given: f"{type(given).__name__} {getattr(given, 'dtype', '')}",
)  # fmt: skip
def test_lengths_of_any_kind(given: Any) -> None:
    """torch has no minimum of unsigned integers, and takes no array of negative strides."""
    assert checked_lengths(given, range(8)).tolist() == LENGTHS
    assert LengthBatchSampler(checked_lengths(LENGTHS, range(8)), batch_size=np.int64(2)).state_dict()["order"]["batch_size"] == 2


def test_it_says_what_padding_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autopar")
    LengthBatchSampler(natural_lengths(10_000), batch_size=32)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.messages == [
        "batches by length: 5 lengths (32, 64, 104, 160, 256), 20 % padding; one length would pad 68 %; an epoch leaves out 112 "
        "of 10000 examples, where a bucket is no whole number of batches"
    ]
    assert "1 length (256), 68 % padding; an epoch repeats 16 of 10000" in LengthBatchSampler(
        natural_lengths(10_000), batch_size=32, programs=1, drop_last=False
    ).words()
    LengthBatchSampler(natural_lengths(100), batch_size=60)
    assert caplog.records[-1].levelname == "WARNING", "40 of 100 examples are left out"


@pytest.mark.parametrize(
    ("lengths", "options", "problem"),
    [
        ([*LENGTHS[:-1], 0], {}, "example 7 has length 0: leave out examples without tokens"),
        ([*LENGTHS[:-1], -3], {}, "example 7 has length -3"),
        ([*LENGTHS[:-1], 2**62], {}, "example 7 has length 4611686018427387904: give lengths in tokens, of 2147483648 at most"),
        (LENGTHS[:-1], {}, "7 lengths for 8 examples: give one for each"),
        ([*LENGTHS[:-1], 2.0], {}, "lengths= takes one integer for each example"),
        (torch.tensor(LENGTHS).view(2, 4), {}, "lengths= takes one integer for each example"),
        ([*LENGTHS[:-1], "2"], {}, "lengths= takes one integer for each example"),
        ([*LENGTHS[:-1], None], {}, "lengths= takes one integer for each example"),
        ([True] * 8, {}, "lengths= takes one integer for each example"),
        (LENGTHS, {"batch_size": 5, "num_replicas": 2}, "batch_size=5 does not divide over dp=2: give a multiple of 2"),
        (LENGTHS, {"batch_size": 16}, "8 examples are fewer than a global batch of 16"),
        (LENGTHS, {"batch_size": 0}, "batch_size=0: give a positive integer"),
        (LENGTHS, {"programs": 0}, "programs=0: give a positive integer"),
        (LENGTHS, {"multiple": 1.5}, r"multiple=1\.5: give a positive integer"),
    ],
)
def test_what_cannot_be_is_refused(lengths: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RuntimeProblem, match=problem) as refused:
        LengthBatchSampler(checked_lengths(lengths, range(8)), **{"batch_size": 4, **options})
    assert "\n" not in str(refused.value)


def test_longer_examples_than_were_stated() -> None:
    sampler = LengthBatchSampler(checked_lengths(torch.tensor(LENGTHS, dtype=torch.uint8), range(8)), batch_size=2)
    assert [sampler.padded_length(length) for length in (1, 8, 9, 16)] == [8, 8, 16, 16]
    for length in (17, 0):
        with pytest.raises(RuntimeProblem, match=f"an example has length {length}, and the sampler's lengths go from 1 to 16"):
            sampler.padded_length(length)


# -- with a parallel model


def test_the_guide_pads_with_transformers() -> None:
    """The code of the page, with data rank 1 of 2 in the place of the model."""
    from tokenizers import Tokenizer, models
    from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerFast

    page = (Path(__file__).parents[3] / "docs" / "guide.md").read_text()
    (code,) = re.findall(r"## Sequences of different lengths.*?```python\n(.*?)```", page, re.S)
    ids = [list(range(1, 1 + length)) for length in natural_lengths(100).tolist()]
    dataset = [{"input_ids": each, "attention_mask": [1] * len(each), "labels": each} for each in ids]
    batches: list[dict[str, Tensor]] = []

    class Stub:
        def sampler(self, dataset: Any, lengths: list[int]) -> LengthBatchSampler:
            return LengthBatchSampler(checked_lengths(lengths, dataset), batch_size=8, rank=1, num_replicas=2)

        def local_batch(self, **batch: Tensor) -> None:
            batches.append(batch)

        def __call__(self, batch: None) -> None:
            pass

    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
    names = {"dataset": dataset, "parallel": Stub(), "tokenizer": tokenizer, "DataCollatorForSeq2Seq": DataCollatorForSeq2Seq}
    exec(code, names | {"DataLoader": DataLoader})
    sampler = Stub().sampler(dataset, [len(each) for each in ids])
    assert len(batches) == 3 * len(sampler)
    for batch in batches:
        assert batch.keys() == {"input_ids", "attention_mask", "labels"}
        assert {tuple(tensor.shape) for tensor in batch.values()} <= {(4, edge) for edge in sampler.edges}
        assert batch["input_ids"].shape == batch["labels"].shape
        padding = batch["attention_mask"] == 0
        assert torch.equal(padding, batch["labels"] == -100) and torch.equal(padding, batch["input_ids"] == 0)


class Language(nn.Module):
    """One layer of attention with a padding mask; the loss is a mean over the labels that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.project, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        h = self.words(input_ids)
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(h).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attention_mask.bool()[:, None, None])
        logits = self.head(h + mixed.transpose(1, 2).flatten(2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Examples:
    """Sequences of these lengths; of the labels every third does not count."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> Tensor:
        return torch.randint(1, WORDS, (self.lengths[place],), generator=torch.Generator().manual_seed(place))


def collate(examples: list[Tensor], length: int) -> dict[str, Tensor]:
    ids = torch.stack([nn.functional.pad(each, (0, length - len(each))) for each in examples])
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill((mask == 0) | (ids % 3 == 0), -100)}


def trained(force: str, world: int) -> tuple[int, int, int]:
    """Compare a step of each length, and the first six, with one process, and return the number of programs, of batches of an
    epoch, and of lengths that batches in the order of the data set would have, each padded to its longest example."""
    lengths = natural_lengths(8000).tolist()
    dataset = Examples(lengths)
    torch.manual_seed(1)
    plain = Language().double()
    example = collate([dataset[place] for place in range(8)], 256)
    parallel = autopar.parallelize(plain, f"local:{world}", example, force=force, cache=False)
    own = lengths[::-1] if dist.get_rank() == 1 else lengths
    with pytest.raises(MismatchProblem, match=r"rank 1 .* has lengths_checksum of a sampler .*: give it the same data set"):
        parallel.sampler(dataset, lengths=own)
    sampler = parallel.sampler(dataset, lengths=lengths)
    assert sampler.batch_size == 8, "the plan's"
    batches = sampler.global_batches().tolist()
    loader = DataLoader(
        dataset, batch_sampler=sampler, collate_fn=lambda examples: collate(examples, sampler.padded_length(len(examples[0])))
    )
    seen = {0}
    for number, part in enumerate(loader):
        length = part["input_ids"].shape[1]
        if number >= 6 and length in seen:
            continue
        seen.add(length)
        loss = parallel(parallel.local_batch(**part))
        expected = plain(**collate([dataset[place] for place in batches[number]], length))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
        loss.backward()
        expected.backward()
        same_gradients(parallel, plain)
        for parameter in (*parallel.parameters(), *plain.parameters()):
            parameter.grad = None
        if len(seen) > len(sampler.edges) and number >= 6:
            break
    assert seen == {0, *sampler.edges}
    found = {sampler.padded_length(lengths[example]) for batch in batches for example in batch}
    assert found == set(sampler.edges), "no other length in the whole epoch"
    programs = len({id(each) for each in parallel.variants.programs.values()})
    return programs, len(batches), len({max(lengths[at : at + 8]) for at in range(0, 8000, 8)})


@pytest.mark.parametrize(("force", "world"), [("dp=2", 2), pytest.param("dp=2,tp=2", 4, marks=pytest.mark.slow)])
def test_a_thousand_batches_have_five_programs(ranks: RankPool, force: str, world: int) -> None:
    for programs, batches, naive in ranks.run(trained, force, world, world=world, timeout=200):
        assert programs == 5, "that of the example inputs, which have the longest length, is one of them"
        assert batches > 990 and naive > 150, "each of these lengths would be a program"
