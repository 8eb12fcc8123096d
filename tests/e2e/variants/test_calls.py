"""One parallel model, many kinds of calls: lengths, batch sizes, modes and arguments that the example inputs did not have. Each
equals one process, in losses, gradients and updated weights, and its program is made once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.harness.comparison import same_state, step_alike
from support.harness.rank_pool import RankPool
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError

WORDS = 32


class Model(nn.Module):
    """A language model; `kind` is what depends on the mode."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.0), nn.Linear(32, 16)) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(16) if kind == "batch_norm" else nn.Identity()
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float | Scale = 1.0) -> Any:
        h = self.words(x)
        for layer in self.layers:
            h = h + layer(h)
        if self.kind == "branch" and not self.training:
            h = h * 2
        logits = self.head(self.norm(h.transpose(1, 2)).transpose(1, 2)) * (scale.factor if isinstance(scale, Scale) else scale)
        if y is None:
            return logits
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def batch(size: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * size + length + seed)
    made = torch.randint(0, WORDS, (2, size, length), generator=generator)
    return made[0], made[1]


class Scale:
    """An argument that is no plain constant and has no ``repr`` of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Pair:
    """A parallel model beside the plain one, each with its optimizer."""

    def __init__(self, kind: str, force: str, **options: Any) -> None:
        torch.manual_seed(1)
        self.plain = Model(kind).double()
        self.parallel = autopar.parallelize(self.plain, "local:4", batch(8, 12), force=force, cache=False, **options)
        self.both = self.parallel, self.plain
        self.optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in self.both]

    def step(self, *inputs: Tensor, **more: Any) -> None:
        """A training step of both."""
        step_alike(self.both, self.optimizers, *inputs, **more)

    def same_values(self, *inputs: Tensor) -> None:
        found, expected = (model(*inputs) for model in self.both)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    def train(self, mode: bool) -> None:
        for model in self.both:
            model.train(mode)


def programs(pair: Pair) -> int:
    return len({id(each) for each in pair.parallel.variants.programs.values()})


def lengths_and_batches(force: str) -> None:
    pair = Pair("", force)
    made = 0
    for epoch in range(2):
        for size, length in ((8, 12), (8, 7), (7, 12), (1, 5), (4, 12), (12, 12)):
            pair.step(*batch(size, length, epoch))
        assert not epoch or programs(pair) == made, "nothing new in the second epoch"
        made = programs(pair)
    with pytest.raises(AutoparError, match="target"):
        pair.parallel(*batch(8, 12), target=1)


def modes(force: str) -> None:
    """Evaluation with another branch; of one submodule; without labels; and with labels and gradients."""
    pair = Pair("branch", force)
    for seed in range(2):
        pair.step(*batch(8, 12, seed))
        pair.train(False)
        with torch.no_grad():
            pair.same_values(batch(8, 12)[0])
            pair.same_values(batch(3, 9)[0])
        pair.step(*batch(8, 12))
        pair.train(True)
        for model in pair.both:
            model.layers[1].eval()
        pair.step(*batch(8, 12))
        pair.train(True)
        pair.step(*batch(8, 12), scale=2.0)
    scale = Scale(2.0)
    for scale.factor in (2.0, 3.0):
        pair.step(*batch(8, 12), scale=scale)
    assert isinstance(pair.parallel.layers[0][1], nn.GELU) and len(pair.parallel.layers) == 3


def batch_norm_in_both_modes(force: str) -> None:
    """Training, evaluation with the running statistics, a ragged batch, and frozen statistics in training."""
    pair = Pair("batch_norm", force)
    for size in (8, 7):
        pair.step(*batch(size, 12))
        pair.train(False)
        with torch.no_grad():
            pair.same_values(batch(8, 12)[0])
        pair.step(*batch(8, 12))
        pair.train(True)
    for model in pair.both:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
    pair.step(*batch(8, 12))
    same_state(pair.parallel, pair.plain)


def captured_in_evaluation(force: str) -> None:
    """As `from_pretrained` returns it; then trained."""
    torch.manual_seed(1)
    plain = Model("branch").double().eval()
    parallel = autopar.parallelize(plain, "local:4", batch(8, 12), force=force, cache=False)
    for mode in (False, True):
        loss, expected = parallel.train(mode)(*batch(8, 12))[1], plain.train(mode)(*batch(8, 12))[1]
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)


def different_calls(force: str) -> None:
    """Ranks that call differently are told, all of them, and go on."""
    pair = Pair("", force)
    pair.step(*batch(8, 12))
    rank = torch.distributed.get_rank()
    with pytest.raises(AutoparError, match="rank 2 .* has a call with x int64 .B, 11.*call it alike"):
        pair.parallel(*batch(8, 11 if rank == 2 else 12))
    pair.parallel.train(rank != 1)
    with pytest.raises(AutoparError, match="rank 1 .* in evaluation"):
        pair.parallel(*batch(8, 12))
    pair.parallel.train()
    pair.step(*batch(8, 12))


def local_parts_of_other_sizes(force: str) -> None:
    """Each data rank's own part, of other lengths than the example's."""
    pair = Pair("", force)
    dp = pair.parallel.program.mesh.dp
    for size, length in ((8, 12), (8, 10), (4, 10)):
        x, y = batch(size, length)
        _, expected = pair.plain(x, y)
        mine = pair.parallel.local_batch(x=x.chunk(dp.size)[dp.coordinate], y=y.chunk(dp.size)[dp.coordinate])
        assert pair.parallel(mine)[1].item() == pytest.approx(expected.item(), rel=1e-12)


def more_kinds_of_calls(force: str) -> None:
    """The least recently used program goes, with a line; the first one stays."""
    from autopar.runtime import variants

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    variants.LOGGER.addHandler(handler)
    before, variants.MOST_VARIANTS = variants.MOST_VARIANTS, 4
    try:
        pair = Pair("", force)
        for length in (12, 5, 6, 7, 5, 12):
            pair.step(*batch(8, length))
        assert len(pair.parallel.variants.programs) <= 4
    finally:
        variants.MOST_VARIANTS = before
        variants.LOGGER.removeHandler(handler)
    assert any("is dropped" in line for line in lines) == (torch.distributed.get_rank() == 0)


class Heads(nn.Module):
    """A head for each task, or all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.heads = nn.Linear(8, 16), nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 1)})

    def forward(self, x: Tensor, task: str | None = None) -> Any:
        h = torch.tanh(self.up(x))
        return self.heads[task](h) if task else {name: head(h) for name, head in self.heads.items()}


def heads_by_argument(force: str) -> None:
    """Planned with a call of one task, another one is refused with a remedy, which works."""
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cluster, losses = f"local:{torch.distributed.get_world_size()}", []
    torch.manual_seed(0)
    model = Heads().double()
    one = autopar.parallelize(model, cluster, {"x": x, "task": "a"}, force=force)
    with pytest.raises(AutoparError, match=r"reads heads.b.bias, .* a call that computes all of them"):
        one(x=x, task="b")
    for each in (autopar.parallelize(model, cluster, {"x": x}, force=force), model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for task in "abab":
            optimizer.zero_grad()
            loss = each(x=x, task=task).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-9)


FORCES = [
    "dp=2,tp=2,zero=3",
    *(pytest.param(force, marks=pytest.mark.slow) for force in ("dp=4,zero=3", "tp=4", "dp=2,tp=2,zero=0", "dp=4,zero=1", "")),
]
STAGED = [
    "pp=2,dp=2",
    *(pytest.param(force, marks=pytest.mark.slow) for force in ("pp=2,tp=2,micro=2", "pp=4", "pp=2,dp=2,zero=3")),
]
EVERYWHERE = [lengths_and_batches, modes]
SHARED = [batch_norm_in_both_modes, captured_in_evaluation, different_calls, local_parts_of_other_sizes, more_kinds_of_calls]
SHARED += [heads_by_argument]


@pytest.mark.parametrize("force", FORCES)
@pytest.mark.parametrize("check", [*EVERYWHERE, *SHARED], ids=lambda check: check.__name__)
def test_calls(check: Any, force: str, ranks: RankPool) -> None:
    ranks.run(check, force)


@pytest.mark.parametrize("force", STAGED)
@pytest.mark.parametrize("check", EVERYWHERE, ids=lambda check: check.__name__)
def test_calls_of_pipelines(check: Any, force: str, ranks: RankPool) -> None:
    ranks.run(check, force)
