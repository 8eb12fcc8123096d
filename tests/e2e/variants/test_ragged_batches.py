"""Batches that do not divide over the data ranks: uneven shards (7 examples as 4 + 3 over dp=2) equal one process, in losses,
gradients, updated weights, statistics and outputs; where a program cannot have them, every data rank computes the whole batch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness.comparison import same_gradients, same_state, step_alike
from support.harness.rank_pool import RankPool
from support.models.routed_mlp import RoutedMlp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.runtime import variants
from autopar.runtime.device.axis import shares_of

WORDS = 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.project(h).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.out(mixed.transpose(1, 2).flatten(2))


class Language(nn.Module):
    """With attention; the loss is a mean over the labels that count."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(WORDS, 16), nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        logits = self.head(self.norm(h.transpose(1, 2)).transpose(1, 2))
        if y is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Contrastive(nn.Module):
    """Every example beside all others: a matrix of B x B, with a mean over both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 12)) for _ in range(2))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        scores = self.left(a) @ self.right(b).T
        return (
            nn.functional.cross_entropy(scores, torch.arange(a.shape[0], device=a.device))
            + (scores**2).mean()
            + self.left(a).std(0).mean()
        )


class OfTheBatch(nn.Module):
    """Examples that are the classes of a loss (CLIP), the rows of a table, and the positions of causal attention."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.left, self.right = (nn.Linear(8, 12, bias=False) for _ in range(2))  # that of keys has no gradient
        self.attention = attention

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        left, right = self.left(a), self.right(b)
        if self.attention:
            return nn.functional.scaled_dot_product_attention(
                left[None, None], right[None, None], a[None, None], is_causal=True
            ).sum()
        scores, own = left @ right.T, torch.arange(a.shape[0], device=a.device)
        losses = (nn.functional.cross_entropy(each, own, label_smoothing=0.1) for each in (scores, scores.T))
        return (
            sum(losses)
            - (scores.T * 2).log_softmax(-1).gather(-1, own[:, None]).mean()
            + nn.functional.embedding(own, left).std()
        )  # type: ignore[no-any-return]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def words(size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(0, WORDS, (2, size, 12), generator=generator)
    y[torch.arange(size) % 3 == 1, 4:] = -100  # ranks have other numbers of labels that count
    return {"x": x, "y": y}


def routed(size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": randn(size, 12, 16, seed=seed), "labels": torch.randint(0, 8, (size, 12), generator=generator)}


def pairs(size: int, seed: int = 0) -> dict[str, Tensor]:
    return {"a": randn(size, 8, seed=seed), "b": randn(size, 8, seed=seed + 1)}


def shares_of_last_call(parallel: Any) -> tuple[int, ...]:
    """Those of the data axis in the program that was met last; none where each data rank computes the whole batch."""
    shares: tuple[int, ...] = next(reversed(parallel.variants.programs.values())).program.mesh.dp.shares
    return shares


def trains(force: str, model: Callable[[], nn.Module], batch: Callable[..., dict[str, Tensor]], uneven: bool = True) -> Any:
    """Steps of 8 and of ragged batches equal one process, and are in uneven shards; both models."""
    torch.manual_seed(1)
    plain = model().double()
    parallel = autopar.parallelize(plain, "local:4", batch(8), force=force, cache=False)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (parallel, plain)]
    for number, size in enumerate((8, 7, 5, 7, 8)):
        step_alike((parallel, plain), optimizers, **batch(size, number))
        dp = parallel.program.mesh.dp.size
        if size % dp and uneven:
            assert shares_of_last_call(parallel) == shares_of(size, dp), size
    same_state(parallel, plain, rtol=1e-8, atol=1e-10)
    return parallel, plain


def language_model(degrees: str) -> None:
    """And two calls before a backward."""
    parallel, plain = trains(degrees, Language, words)
    first, second = (parallel(**words(size))[1] for size in (7, 5))
    (first + second).backward()
    sum(plain(**words(size))[1] for size in (7, 5)).backward()
    same_gradients(parallel, plain)


def evaluated_and_compiled(degrees: str) -> None:
    """Logits in evaluation, and compiled blocks."""
    torch.manual_seed(1)
    plain = Language(batch_norm=True).double()
    parallel = autopar.parallelize(plain, "local:4", words(8), force=degrees, cache=False, compile="aot_eager")
    for size in (7, 5, 8):
        for model in (parallel, plain):
            model(**words(size))[1].backward()
        same_gradients(parallel, plain)
    parallel.eval()
    plain.eval()
    with torch.no_grad():
        for size in (7, 5):
            x = words(size)["x"]
            torch.testing.assert_close(parallel(x), plain(x), rtol=1e-9, atol=1e-11)


def recomputed(degrees: str) -> None:
    """The backward of a call runs its forward again after a call of another size."""
    sizes = {"tp": "1", **dict(item.split("=") for item in degrees.split(","))}
    configuration = f"tp={sizes['tp']},pp=1,zero={sizes['zero']},micro_batches=1,recompute=full,zero_group=0"
    torch.manual_seed(1)
    plain = Language().double()
    parallel = autopar.parallelize(plain, "local:4", words(8), force=f"{configuration},sequence_parallel=0", cache=False)
    assert any(block.recompute for block in parallel.program.blocks())
    for model in (parallel, plain):
        sum(model(**words(size))[1] for size in (7, 5, 8)).backward()
    same_gradients(parallel, plain)


def batch_norm(degrees: str) -> None:
    trains(degrees, lambda: Language(batch_norm=True), words)


def contrastive(degrees: str) -> None:
    trains(degrees, Contrastive, pairs)


def of_the_batch(degrees: str) -> None:
    trains(degrees, partial(OfTheBatch, False), pairs)
    trains(degrees, partial(OfTheBatch, True), pairs, uneven=False)


def mixture_of_experts(degrees: str) -> None:
    trains(degrees, RoutedMlp, routed)


def experts_on_an_axis(degrees: str) -> None:
    """Where the batch is on the axis of the experts too, the data ranks cannot have uneven shards, or can: both are exact."""
    trains(degrees, RoutedMlp, routed, uneven=False)
    trains(degrees, lambda: RoutedMlp(capacity=1.0, flat=True), routed, uneven=False)


def losses_outside(degrees: str) -> None:
    """Full outputs that take gradients, gradients into inputs, and outputs as DTensors."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5)).double()
    parallel = autopar.parallelize(plain, "local:4", (randn(8, 8),), force=degrees, cache=False)
    for size in (8, 7, 5):
        inputs = [randn(size, 8, seed=size).requires_grad_() for _ in range(2)]
        for model, x in zip((parallel, plain), inputs, strict=True):
            model.zero_grad()
            result = model(x)
            assert result.shape == (size, 5)
            (nn.functional.cross_entropy(result, torch.arange(size) % 5) + result.square().mean()).backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-9, atol=1e-11)
        same_gradients(parallel, plain)
    assert sum(shares_of_last_call(parallel)) == 5
    torch.manual_seed(1)
    scored = Language().double()
    parallel = autopar.parallelize(scored, "local:4", words(8), force=degrees, outputs=("0:dtensor",), cache=False)
    found = parallel(**words(7))[0]
    torch.testing.assert_close(found.full_tensor(), scored(**words(7))[0], rtol=1e-9, atol=1e-11)


def whole_where_it_must(degrees: str) -> None:
    """Statistics of each data rank's own examples, and a batch with fewer examples than data ranks; a line says so."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = variants.LOGGER.level
    variants.LOGGER.addHandler(handler)
    variants.LOGGER.setLevel(logging.INFO)
    try:
        for norm, size in ((True, 7), (True, 5), (False, 1), (False, 7)):
            torch.manual_seed(1)
            plain = Language(norm).double()
            parallel = autopar.parallelize(plain, "local:4", words(8), force=degrees, batch_norm="local", cache=False)
            for model in (parallel, plain):
                model(**words(size))[1].backward()
            same_gradients(parallel, plain)
            assert bool(shares_of_last_call(parallel)) == (size == 7 and not norm)
    finally:
        variants.LOGGER.removeHandler(handler)
        variants.LOGGER.setLevel(level)
    dp = parallel.program.mesh.dp.size
    for words_of_it in (
        f"no uneven shards of 7 examples over dp={dp}: .*takes the statistics of a rank's examples",
        f"whole on each of {dp} data ranks",
        f"7 examples as {' [+] '.join(map(str, shares_of(7, dp)))} over dp",
    ):
        assert any(re.search(words_of_it, line) for line in lines) == (torch.distributed.get_rank() == 0), lines


FORCES = [
    "dp=2,tp=2,zero=3",
    *(pytest.param(force, marks=pytest.mark.slow) for force in ("dp=2,tp=2,zero=0", "dp=4,zero=3", "dp=4,zero=1")),
]
CHECKS = [
    *(language_model, batch_norm, losses_outside, mixture_of_experts, of_the_batch),
    *(
        pytest.param(check, marks=pytest.mark.slow)
        for check in (contrastive, recomputed, whole_where_it_must, evaluated_and_compiled)
    ),
]


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_ragged_batches(check: Any, force: str, ranks: RankPool) -> None:
    ranks.run(check, force)


def test_examples_that_are_classes(ranks: RankPool) -> None:
    """A rank took its own number of examples for that of all others, and so the wrong example for a label's."""
    ranks.run(of_the_batch, "dp=4,zero=3")


@pytest.mark.slow
def test_experts_on_an_axis(ranks: RankPool) -> None:
    ranks.run(experts_on_an_axis, "dp=2,ep=2,zero=3")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x) @ memory.transpose(1, 2)) @ memory  # type: ignore[no-any-return]


class Queries(nn.Module):
    """What is between its two kinds of layers reads no input: queries for each example, and their number."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.ModuleList(Residual() for _ in range(3)) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(1, 3, 6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x, x)
        y, examples = self.queries.expand(x.shape[0], -1, -1), torch.ones(x.shape[0]).sum()
        for layer in self.decoder:
            y = layer(y, x)
        return y.square().sum() / examples


def queries_of_each_batch(degrees: str) -> None:
    """On a rank."""
    torch.manual_seed(0)
    models = [Queries().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.randn(8, 5, 6, dtype=torch.float64)
    parallel = autopar.parallelize(models[0], "local:2", (x,), force=degrees, cache=False)
    for size in (8, 4, 6):
        for model in (parallel, models[1]):
            model.zero_grad()
            model(x[:size]).backward()
        assert float(parallel(x[:size])) == pytest.approx(float(models[1](x[:size])), rel=1e-9)
        gradient = models[1].queries.grad
        assert gradient is not None
        torch.testing.assert_close(whole_gradient(parallel, "queries"), gradient, rtol=1e-9, atol=1e-11)


def whole_gradient(parallel: Any, name: str) -> Tensor:
    gradient = dict(parallel.named_parameters())[name].grad
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("force", ["dp=2", "tp=2,dp=1"])
def test_blocks_that_read_no_input_know_the_batch(force: str, ranks: RankPool) -> None:
    """They had that of the plan: another number of examples, and with it another loss."""
    ranks.run(queries_of_each_batch, force, world=2)
