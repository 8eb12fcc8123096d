"""Ranks with different models, programs, versions or batches end in one line on all of them, before anything is computed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.handwritten_program import Model, V, make
from torch import nn

from autopar.errors import PlanMismatch
from autopar.runtime.errors import RuntimeProblem
from autopar.runtime.step.same_batch import ComparedCalls


def refusals(kind: str) -> str:
    """On a rank: what the first call says where rank 2 differs, and the loss of a call after that in which it does not."""
    import torch.distributed as dist

    from autopar.runtime.comm import agreement
    from autopar.runtime.parallel import Parallel

    odd = dist.get_rank() == 2
    model = Model().double()
    parallel = Parallel(make({"dp": 2, "tp": 2}, 0), model.state_dict())
    good = {name: torch.randint(V, (8, 5), generator=torch.Generator().manual_seed(0)) for name in ("ids", "labels")}
    batch: Any = good
    versions = agreement.metadata.version
    if odd and kind == "shape":
        batch = {name: value[:4] for name, value in good.items()}
    if odd and kind == "dtype":
        batch = good | {"labels": good["labels"].int()}
    if kind == "refused later":
        parallel(**good)
    if odd and kind in ("refused", "refused later"):
        batch = {"ids": good["ids"]}
    if odd and kind == "program":
        parallel.calls.program_digest = "another"
    if odd and kind == "version":
        agreement.metadata.version = lambda name: "0.0.1"
    if kind == "local":
        batch = parallel.local_batch(**{name: value[: 2 if odd else 4] for name, value in good.items()})
    try:
        parallel(**batch) if kind != "local" else parallel(batch)
    except RuntimeProblem as problem:
        parallel.calls.program_digest = "the same"
        agreement.metadata.version = versions
        assert torch.isfinite(parallel(**good))
        return f"{type(problem).__name__}: {problem}"
    return "no problem"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("shape", ("MismatchProblem: rank 2 (dp=1, tp=0)", "has input ids int64 (4, 5), rank 0 (dp=0, tp=0) has int64 (8, 5)")),
        ("dtype", ("rank 2 (dp=1, tp=0)", "input labels int32 (8, 5)")),
        ("refused", ("BatchError", "misses labels")),
        ("refused later", ("BatchError", "misses labels")),
        ("program", ("rank 2 (dp=1, tp=0)", "program another", "start all ranks with one plan")),
        ("version", ("rank 2 (dp=1, tp=0)", "autopar 0.0.1", "install the same version")),
        ("local", ("rank 2 (dp=1, tp=0)", "input ids of data rank 1 int64", "(2, 5)", "pass the same batch")),
    ],
)
def test_a_difference_is_one_line_on_every_rank(kind: str, words: tuple[str, ...], ranks: RankPool) -> None:
    for rank, text in enumerate(ranks.run(refusals, kind)):
        assert all(word in text for word in words) and "\n" not in text, f"rank {rank}: {text}"
        assert "refused" not in kind or rank == 2 or "rank 2 (dp=1, tp=0) was given another batch" in text


def different_models(kind: str) -> str:
    """On a rank: what `parallelize` says where the model of rank 2 differs, before it plans."""
    import torch.distributed as dist

    from autopar import api

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if dist.get_rank() == 2:
        model[1] = {
            "wider": lambda: nn.Linear(4, 8),
            "without": lambda: nn.Linear(4, 4, bias=False),
            "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
            "dtype": lambda: nn.Linear(4, 4).double(),
        }[kind]()
    try:
        api.parallelize(model, "local:4", {"input": torch.zeros(4, 4)})
    except PlanMismatch as problem:
        return str(problem)
    return "no problem"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("wider", "1.weight is float32 (8, 4), that of rank 0 is float32 (4, 4)"),
        ("without", "1.bias is none, that of rank 0 is float32 (4,)"),
        ("frozen", "1.weight is frozen float32 (4, 4)"),
        ("dtype", "1.weight is float64"),
    ],
)
def test_another_model_on_one_rank_is_refused_on_all(kind: str, words: str, ranks: RankPool) -> None:
    for text in ranks.run(different_models, kind):
        assert text.startswith("rank 2 has another model: ") and words in text and text.endswith("the same model on all ranks")


@pytest.mark.parametrize(
    ("every", "modes", "compared"),
    [
        (10, "t" * 24, [0, 1, 2, 10, 20]),
        (0, "tttttteeeeee", []),
        (100, "ttttteeeeetttttet", [0, 1, 2, 5, 6, 7, 10, 15]),  # the last change is too near to the one before it
        (100, "tete" * 5, [0, 1, 2, 3, 4, 5]),  # actor and critic
    ],
)
def test_the_calls_that_are_compared(every: int, modes: str, compared: list[int]) -> None:
    calls, by_mode = ComparedCalls(every), Counter()
    assert [number for number, mode in enumerate(modes) if calls.compares(mode, by_mode)] == compared


def test_a_further_program_is_compared() -> None:
    calls, first, other = ComparedCalls(100), Counter(), Counter()
    assert [calls.compares("t", first) for _ in range(5)] == [True] * 3 + [False] * 2
    assert [calls.compares("t", other) for _ in range(5)] == [True] * 3 + [False] * 2
