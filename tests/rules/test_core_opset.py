"""torch's own samples of ATen's core opset: captured, computed right, and right on shards by every strategy that is offered."""

from __future__ import annotations

from collections import Counter

import pytest
from support.oracles.operation_samples import core_operations, outcome, samples

SOME = ("add", "gather", "cumsum", "nn.functional.grid_sample", "fft.rfft", "index_put", "nn.functional.embedding_bag", "cdist")
RANDOM = ("rand", "randn", "bernoulli", "multinomial", "native_dropout", "normal", "uniform", "empty", "randint", "randperm")


def _swept(names: tuple[str, ...], most: int) -> tuple[Counter[str], list[str]]:
    counts, wrong = Counter[str](), []
    for info in core_operations():
        if names and info.name not in names:
            continue
        random = any(word in info.name for word in RANDOM)
        for model, tensors in samples(info, most):
            found = outcome(model, tensors, random)
            counts[found.partition(":")[0]] += 1
            if found != "equal":
                wrong.append(f"{info.name}: {found}")
    return counts, wrong


def test_some_operations() -> None:
    counts, wrong = _swept(SOME, 2)
    assert counts["equal"] >= len(SOME) and not wrong, wrong


@pytest.mark.slow
def test_core_operations() -> None:
    """At least 95 % of the samples; nothing is wrong, what is left is refused by a line."""
    counts, wrong = _swept((), 4)
    print(dict(counts), *wrong, sep="\n")
    assert counts["equal"] >= 0.95 * counts.total(), (counts, wrong)
    assert not counts["wrong"] and not counts["crashed"], (counts, wrong)
