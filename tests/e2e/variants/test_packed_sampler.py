"""Rows of packed documents (`parallel.sampler(dataset, lengths=..., packed_tokens=...)`): every document once, full rows, one
program, and losses that equal one process, padded batches and one document at a time."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.packed.test_packed_documents import SHALLOW_LLAMA
from e2e.variants.test_batch_sampler import natural_lengths
from hypothesis import given, settings
from hypothesis import strategies as st
from support.harness.comparison import step_alike
from support.harness.end_to_end import sharding_wins
from support.harness.rank_pool import RankPool
from support.models.small_models import VOCABULARY, make_case
from torch.utils.data import DataLoader

import autopar
from autopar.runtime.data.epoch_sampler import checked_lengths
from autopar.runtime.data.packed_sampler import PackedBatchSampler, best_fit
from autopar.runtime.errors import MismatchProblem, RuntimeProblem, StateError

TOKENS = 64
LENGTHS = [31, 9, 12, 3, 47, 8, 64, 2, 20, 13, 5, 5]


def document(place: int, length: int) -> dict[str, list[int]]:
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(place)).tolist()
    return {"input_ids": ids, "attention_mask": [1] * length}


DATASET = [document(place, length) for place, length in enumerate(LENGTHS)]


def sampler_of(lengths: Any = LENGTHS, tokens: Any = TOKENS, **options: Any) -> PackedBatchSampler:
    return PackedBatchSampler(checked_lengths(lengths, range(len(lengths))), packed_tokens=tokens, **options)


# -- the rows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(0, 3), st.booleans())
def test_every_document_once(lengths: list[int], epoch: int, shuffle: bool) -> None:
    sampler = sampler_of(lengths, 50, shuffle=shuffle, seed=3)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    assert len(rows) == len(sampler) and sorted(sum(rows, [])) == list(range(len(lengths)))
    assert all(sum(lengths[each] for each in row) <= 50 for row in rows)
    # as in any first fit, two rows are never both half empty
    assert sum(2 * sum(lengths[each] for each in row) <= 50 for row in rows) <= 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=40))
def test_each_goes_where_it_leaves_the_least_room(lengths: list[int]) -> None:
    rows, rooms = list[list[int]](), list[int]()
    for at, length in enumerate(lengths):
        fits = [row for row, room in enumerate(rooms) if room >= length]
        if not fits:
            rows.append([])
            rooms.append(30)
            fits = [len(rows) - 1]
        least = min(rooms[row] for row in fits)
        row = max(row for row in fits if rooms[row] == least)
        rows[row].append(at)
        rooms[row] -= length
    found = best_fit(range(len(lengths)), lengths, 30)
    assert sorted(sum(lengths[each] for each in row) for row in found) == sorted(30 - room for room in rooms)


def test_rows_are_full_and_epochs_repeat() -> None:
    lengths = natural_lengths(5000).tolist()
    sampler = sampler_of(lengths, 1024)
    assert sampler.words() == "394 rows of 1024 tokens, 0.4 % padding"
    first = list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first != list(sampler_of(lengths, 1024, seed=1))
    again = sampler_of(lengths, 1024)
    again.load_state_dict({**sampler.state_dict(), "yielded": 300})
    assert list(again) == first[300:]
    with pytest.raises(StateError, match="saved with packed_tokens=1024, and has packed_tokens=2048, which draws other batches"):
        sampler_of(lengths, 2048).load_state_dict(sampler.state_dict())


def test_a_row_is_that_of_transformers() -> None:
    from transformers import DataCollatorWithFlattening

    sampler = sampler_of()
    flatten = DataCollatorWithFlattening(return_tensors="pt")
    for row in sampler:
        examples = [DATASET[each] for each in row]
        found, wanted = sampler.collate(examples), flatten(examples)
        used = wanted["input_ids"].shape[1]
        for name in ("input_ids", "labels", "position_ids"):
            assert found[name].shape == (1, TOKENS) and found[name].dtype == wanted[name].dtype, name
            assert torch.equal(found[name][:, :used], wanted[name]), name
        assert found["labels"][:, used:].eq(-100).all() and not found["input_ids"][:, used:].any()
        assert torch.equal(found["position_ids"][0, used:], torch.arange(TOKENS - used))
    long = sampler_of([3], 300).collate([{"input_ids": [4, 5, 6]}])["position_ids"][0]
    assert long[3:].eq(0).nonzero().flatten().tolist() == [0, 128, 256], "padding does not attend to all padding"
    labels = sampler.collate([{"input_ids": [4, 5, 6], "labels": [-100, 5, 6], "weight": torch.rand(3, 2)}])
    assert labels["labels"][0, :3].tolist() == [-100, 5, 6] and labels["weight"].shape == (1, TOKENS, 2)


@pytest.mark.parametrize(
    ("lengths", "tokens", "problem"),
    [
        (LENGTHS, 63, "document 6 has 64 tokens, and a row packed_tokens=63: give longer rows, or cut the document"),
        (LENGTHS, 0, "packed_tokens=0: give a positive integer"),
        (LENGTHS, 64.5, r"packed_tokens=64\.5: give a positive integer"),
        ([*LENGTHS, 0], 64, "example 12 has length 0: leave out examples without tokens"),
    ],
)
def test_what_cannot_be_is_refused(lengths: list[int], tokens: Any, problem: str) -> None:
    with pytest.raises(RuntimeProblem, match=problem) as refused:
        sampler_of(lengths, tokens)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([{"input_ids": [1] * 40}, {"input_ids": [1] * 40}], "the documents of a row have 80 tokens, more than packed_tokens=64"),
        ([{"input_ids": [1, 2], "labels": [1]}], "example 0 of a packed row has .* give each as many numbers of each as it has"),
        ([{"input_ids": [1], "type": [1]}, {"input_ids": [1]}], "example 1 of a packed row"),
        ([{"input_ids": [1], "target": 3}], "example 0 of a packed row"),
        ([{"input_ids": [1], "text": "a"}], r"text of example 0 of a packed row is no numbers of each token: .*remove_columns"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "example 0 of a packed row is padded: give documents without"),
        ([{"input_ids": [1, 2], "position_ids": [0, 0]}], "position_ids of example 0 of a packed row do not count from 0"),
    ],
)
def test_examples_that_are_no_documents(examples: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(RuntimeProblem, match=problem):
        sampler_of().collate(examples)


# -- with a parallel model


def llama() -> torch.nn.Module:
    torch.manual_seed(1)
    return make_case(SHALLOW_LLAMA, torch.float64, 4)[0].double()


def trained(degrees: str) -> tuple[int, int, list[list[int]]]:
    """On a rank: an epoch of packed rows, each step compared with one process; the number of programs, of rows, and the rows."""
    plain = llama()
    example = torch.randint(0, VOCABULARY, (4, 16))
    parallel = autopar.parallelize(
        deepcopy(plain), sharding_wins(4), {"input_ids": example, "labels": example}, force=degrees, cache=False
    )
    with pytest.raises(RuntimeProblem, match="packed_tokens=66 does not divide into the 4 shards of a row: give 68"):
        parallel.sampler(DATASET, lengths=LENGTHS, packed_tokens=np.int64(66))
    with pytest.raises(RuntimeProblem, match="packed_tokens= makes rows that hold every document once: leave out batch_size="):
        parallel.sampler(DATASET, lengths=LENGTHS, packed_tokens=64, batch_size=4)
    with pytest.raises(RuntimeProblem, match="packed_tokens= is for a sampler by length: give lengths= too"):
        parallel.sampler(DATASET, packed_tokens=64)
    with pytest.raises(MismatchProblem, match="of a sampler"):
        parallel.sampler(DATASET, lengths=LENGTHS, packed_tokens=64, seed=torch.distributed.get_rank())
    sampler = parallel.sampler(DATASET, lengths=LENGTHS, packed_tokens=TOKENS)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3, eps=1e-4) for each in (parallel, plain)]
    loader: Any = DataLoader(DATASET, batch_sampler=sampler, collate_fn=sampler.collate)  # type: ignore[arg-type]
    for batch in loader:
        step_alike((parallel, plain), optimizers, tolerance=1e-6, **batch)  # transformers' losses are in float32
    held = parallel.full_state()
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(held[key], tensor, rtol=1e-5, atol=1e-8, msg=key)
    assert parallel.variants is not None
    return len(parallel.variants.different_programs()) - 1, len(sampler), list(sampler)


@pytest.mark.parametrize("force", ["dp=4,tp=1,zero=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)])
def test_an_epoch_equals_one_process(force: str, ranks: RankPool) -> None:
    answers = ranks.run(trained, force, world=4, timeout=300)
    assert answers == [answers[0]] * 4
    programs, count, rows = answers[0]
    assert programs == 1 and sorted(sum(rows, [])) == list(range(len(LENGTHS))) and count == len(rows)


def test_a_pipeline_takes_no_row(ranks: RankPool) -> None:
    ranks.run(refused_by_a_pipeline, world=2, timeout=120)


def refused_by_a_pipeline() -> None:
    example = torch.randint(0, VOCABULARY, (4, 16))
    batch = {"input_ids": example, "labels": example}
    parallel = autopar.parallelize(llama(), sharding_wins(2), batch, force="pp=2", cache=False)
    with pytest.raises(RuntimeProblem, match="a packed row is a single micro-batch, which a pipeline cannot overlap"):
        parallel.sampler(DATASET, lengths=LENGTHS, packed_tokens=64)


def test_the_guide_packs() -> None:
    """The code of the page, with the model of one process."""
    page = (Path(__file__).parents[3] / "docs" / "guide.md").read_text()
    (code,) = re.findall(r"\*\*Packed instead of padded\.\*\*.*?```python\n(.*?)```", page, re.S)

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.calls = llama(), 0

        def sampler(self, dataset: Any, lengths: list[int], packed_tokens: int) -> PackedBatchSampler:
            return sampler_of(lengths, packed_tokens)

        def forward(self, **batch: Any) -> Any:
            self.calls += 1
            return self.model(**batch)

    names: dict[str, Any] = {"dataset": DATASET, "lengths": LENGTHS, "parallel": Plain(), "DataLoader": DataLoader}
    exec(code.replace("65536", str(TOKENS)), names)
    assert names["parallel"].calls == len(names["sampler"]) and torch.isfinite(names["loss"])


def test_packed_padded_and_alone_are_one_loss() -> None:
    """The same documents in a row, in padded examples, and each by itself, weighed by its labels."""
    model, sampler = llama(), sampler_of()
    row = next(iter(sampler))
    examples = [DATASET[each] for each in row]
    packed = model(**sampler.collate(examples)).loss
    longest = max(len(each["input_ids"]) for each in examples)
    ids, mask = (torch.tensor([each[name] + [0] * (longest - len(each[name])) for each in examples])
                 for name in ("input_ids", "attention_mask"))  # fmt: skip
    padded = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    counts = [len(each["input_ids"]) - 1 for each in examples]
    alone = [model(input_ids=ids, labels=ids).loss if count else 0.0 for count, ids in zip(
        counts, (torch.tensor([each["input_ids"]]) for each in examples), strict=True)]  # fmt: skip
    total = sum(loss * count for loss, count in zip(alone, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=0)
    torch.testing.assert_close(packed, torch.as_tensor(total), rtol=1e-6, atol=0)
