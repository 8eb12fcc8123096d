"""Batches of fewer examples than data ranks: where that pays, the data ranks shard sequences (context parallelism chosen call by
call), with the weights where they are; equal to one process in losses, gradients and updated weights."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
from e2e.packed.test_packed_documents import SHALLOW_LLAMA, packed_batch
from e2e.variants.test_ragged_batches import WORDS, Language, routed
from support.harness.comparison import same_gradients, step_alike
from support.harness.end_to_end import sharding_wins
from support.harness.rank_pool import RankPool
from support.models.model_families import families
from support.models.routed_mlp import RoutedMlp
from support.models.small_models import VOCABULARY, make_case
from torch import Tensor, nn

import autopar


def words(size: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, WORDS, (2, size, length), generator=generator)
    y[:, : length // 3] = -100  # some shards of the sequence have no labels that count
    return {"x": x, "y": y}


def tokens(size: int, length: int, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def packed(size: int, length: int, seed: int) -> dict[str, Tensor]:
    """Rows of documents, of which one is as long as half of the row."""
    return packed_batch(tuple((length // 2, *(length // 8,) * 4) for _ in range(size)))


def few_tokens(size: int, length: int, seed: int) -> dict[str, Tensor]:
    return {name: x[:, :1].expand(-1, length, *x.shape[2:]).contiguous() for name, x in routed(size, seed).items()}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int, int], dict[str, Tensor]], float]] = {
    "own": (Language, words, 1e-9),
    "routed": (RoutedMlp, few_tokens, 1e-9),
    **{name: (partial(lambda name: make_case(families()[name], torch.float64, 4)[0], name), tokens, 1e-6)
       for name in ("llama", "mixtral", "deepseek_v3", "gpt2")},  # their losses are in float32
    "packed": (lambda: make_case(SHALLOW_LLAMA, torch.float64, 4)[0], packed, 1e-6),
}  # fmt: skip


def trains(name: str, force: str) -> list[str]:
    """On a rank: steps of many short examples and of few long ones; what programs say of the data ranks."""
    make, batch, tolerance = MODELS[name]
    torch.manual_seed(1)
    plain = make().double()
    parallel = autopar.parallelize(deepcopy(plain), sharding_wins(4), batch(8, 16, 0), force=force, cache=False)
    both = parallel, plain
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3, eps=1e-4) for each in both]
    for number, (size, length) in enumerate(((8, 16), (1, 64), (8, 16), (2, 32), (1, 64))):
        step_alike(both, optimizers, tolerance=tolerance, **batch(size, length, number))
    held = parallel.full_state()
    for key, tensor in plain.state_dict().items():
        torch.testing.assert_close(held[key], tensor, rtol=10 * tolerance, atol=1e-10 if tolerance < 1e-8 else 1e-8, msg=key)
    programs = [each.program for each in parallel.variants.programs.values()]
    files = [type(each).forward.__code__.co_filename for each in programs if each.mesh.axis("cp").size > 1]
    return ["sharded" if "self.mesh.cp" in "".join(linecache.getlines(file)) else "whole" for file in files]


@pytest.mark.parametrize(
    ("name", "force"),
    [
        ("own", "dp=4,tp=1,zero=0"),
        ("own", "dp=4,tp=1,zero=3"),
        ("own", "dp=2,tp=2,zero=2"),
        ("packed", "dp=4,tp=1,zero=1"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (
            ("own", "dp=4,tp=1,pp=1,zero=2,micro_batches=2,recompute=selective,zero_group=0,sequence_parallel=0"),
            ("own", "dp=4,tp=1,pp=1,zero=3,micro_batches=1,recompute=full,zero_group=2,sequence_parallel=0"),
            ("routed", "dp=4,ep=1,tp=1"), ("llama", "dp=2,tp=2"), ("llama", "dp=4,tp=1,zero=3"),
            ("mixtral", "dp=4,tp=1,zero=2"), ("mixtral", "dp=2,tp=2"), ("deepseek_v3", "dp=4,tp=1,zero=3"),
            ("gpt2", "dp=4,tp=1,zero=1"),
        )),
    ],
)  # fmt: skip
def test_sequences_over_the_data_ranks(name: str, force: str, ranks: RankPool) -> None:
    answers = ranks.run(trains, name, force, world=4, timeout=300)
    assert answers == [["sharded"] * (2 if "dp=4" in force else 1)] * 4  # two examples divide over dp=2


def answers(degrees: str) -> tuple[bool, bool]:
    """On a rank: whether logits of one example in evaluation, by proven programs, and outputs of two are right."""
    torch.manual_seed(1)
    plain, (_, batch, _) = Language().double(), MODELS["own"]
    proven = autopar.parallelize(deepcopy(plain), sharding_wins(4), batch(8, 16, 0), force=degrees, cache=False, proof=True)
    one = batch(1, 64, 3)
    plain.eval(), proven.eval()
    with torch.no_grad():
        logits = torch.equal(proven(**one)[0].round(decimals=9), plain(**one)[0].round(decimals=9))
        alone = torch.allclose(proven(x=one["x"]), plain(x=one["x"]), rtol=0, atol=1e-12)
    two = batch(2, 30, 4)
    placed = autopar.parallelize(
        deepcopy(plain.train()), sharding_wins(4), batch(8, 16, 0), force=degrees, cache=False, outputs=("0:dtensor",)
    )
    alone &= torch.allclose(placed(**two)[0].full_tensor(), plain(**two)[0], rtol=0, atol=1e-12)
    return logits, alone


@pytest.mark.parametrize("force", ["dp=4,tp=1,zero=1", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)])
def test_evaluation_of_one_example(force: str, ranks: RankPool) -> None:
    assert ranks.run(answers, force, world=4, timeout=300) == [(True, True)] * 4


def writes(degrees: str) -> bool:
    """On a rank: whether the tokens that are generated for one prompt are right."""
    torch.manual_seed(1)
    language, _ = make_case(families()["llama"], torch.float64, 4)
    parallel = autopar.parallelize(deepcopy(language), sharding_wins(4), tokens(8, 16, 0), force=degrees, cache=False)
    prompt = tokens(1, 8, 5)["input_ids"]
    return torch.equal(parallel.generate(prompt, max_new_tokens=6), language.generate(prompt, max_new_tokens=6))


@pytest.mark.slow
@pytest.mark.parametrize("force", ["dp=4,tp=1,zero=1", "dp=2,tp=2"])
def test_generation_from_one_prompt(force: str, ranks: RankPool) -> None:
    assert ranks.run(writes, force, world=4, timeout=300) == [True] * 4


def in_any_order(force: str, orders: tuple[tuple[int, ...], ...]) -> None:
    """On a rank: calls of many numbers of examples are right, whichever comes first and makes a program."""
    for sizes in orders:
        torch.manual_seed(1)
        plain = Language().double()
        parallel = autopar.parallelize(deepcopy(plain), sharding_wins(4), words(16, 16, 0), force=force, cache=False)
        for number, size in enumerate(sizes):
            losses = []
            for each in (parallel, plain):
                each.zero_grad()
                result = each(**words(size, 16, number))
                losses.append(result[-1] if isinstance(result, tuple) else result)
                losses[-1].backward()
            assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-9), (sizes, size)
            same_gradients(parallel, plain)


FOUR_PARTS = "dp=4,tp=1,pp=1,zero=2,micro_batches=4,recompute=selective,zero_group=0,sequence_parallel=0"


@pytest.mark.parametrize(("force", "orders"), [("dp=4,tp=1", ((2, 1, 3, 6, 5),)), (FOUR_PARTS, ((2, 1, 8, 12, 4),))])
def test_any_order(force: str, orders: tuple[tuple[int, ...], ...], ranks: RankPool) -> None:
    ranks.run(in_any_order, force, orders, world=4, timeout=300)
