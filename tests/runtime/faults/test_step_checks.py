"""`check_every`: replicas that have drifted apart, and losses that are not finite, are found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.harness.rank_pool import RankPool
from support.models.handwritten_program import Model, V, make

PROGRAMS = {
    "dp=2,tp=2": ({"dp": 2, "tp": 2}, 0),
    "dp=4,zero=3": ({"dp": 4}, 3),
    "dp=4,zero=3,zero_group=2": ({"dp": 4, "state": 2}, 3),
}
ODD = 3


def parallel_of(plan: str, every: int) -> Any:
    """On a rank."""
    from support.harness.training_loop import parallel_model
    from support.models import handwritten_pipeline

    from autopar.runtime.parallel import Parallel

    torch.manual_seed(0)
    if plan == "pp=2,dp=2":
        text = handwritten_pipeline.pipeline_text(handwritten_pipeline.built_schedule("1f1b", 2, 2), 2, dp=2)
        return parallel_model(text, handwritten_pipeline.model().state_dict(), check_every=every)
    return Parallel(make(*PROGRAMS[plan]), Model().double().state_dict(), check_every=every)


def batch() -> dict[str, torch.Tensor]:
    return {name: torch.randint(1, V, (16, 6), generator=torch.Generator().manual_seed(0)) for name in ("ids", "labels")}


def step(parallel: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    parallel(**batch()).backward()
    optimizer.step()


def found_drift(plan: str, name: str, by: str, every: int) -> tuple[str, int]:
    """On a rank: what a training says in which one rank's copy is changed after three clean steps, and in which step."""
    import torch.distributed as dist

    from autopar.runtime.errors import ReplicaProblem

    parallel = parallel_of(plan, every)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(3):
        step(parallel, optimizer)
    held = parallel.state.parameters.get(name, parallel.state.buffers.get(name))
    local = None if held is None else held.to_local() if hasattr(held, "to_local") else held
    before = None if local is None else local.clone()
    with torch.no_grad():
        if dist.get_rank() == ODD and by != "nothing":
            assert local is not None
            at = (0,) * local.dim()
            local[at] = local[at] + 1e-3 if by == "1e-3" else torch.nextafter(local[at], local[at] + 1)
    for number in range(4, 10):
        try:
            step(parallel, optimizer)
        except ReplicaProblem as problem:
            if before is not None and local is not None:
                with torch.no_grad():
                    local.copy_(before)
            step(parallel, optimizer)  # ranks are still in step with each other
            return str(problem), number
    return "", 0


MAJORITY = "rank 3 ({}) of 4 ranks has another copy of {}"
PAIR = "rank 1 ({}) and rank 3 ({}) hold different copies of {}"
CASES = [
    ("dp=2,tp=2", "layers.0.norm.weight", MAJORITY.format("dp=1, tp=1", "layers.0.norm.weight")),
    ("dp=2,tp=2", "layers.1.down.weight", PAIR.format("dp=0, tp=1", "dp=1, tp=1", "layers.1.down.weight")),
    ("dp=2,tp=2", "layers.0.steps", MAJORITY.format("dp=1, tp=1", "layers.0.steps")),
    ("dp=4,zero=3", "layers.1.scale", MAJORITY.format("dp=3", "layers.1.scale")),
    ("dp=4,zero=3", "layers.0.steps", MAJORITY.format("dp=3", "layers.0.steps")),
    ("dp=4,zero=3,zero_group=2", "layers.0.fused.weight", PAIR.format("dp=1", "dp=3", "layers.0.fused.weight")),
    (
        "pp=2,dp=2",
        "layers.3.up.weight",
        "rank 2 (pp=1, dp=0) and rank 3 (pp=1, dp=1) hold different copies of layers.3.up.weight",
    ),
    ("pp=2,dp=2", "embed.weight", MAJORITY.format("pp=1, dp=1", "embed.weight")),
]


@pytest.mark.parametrize(("plan", "name", "words"), CASES)
def test_drift_is_named(plan: str, name: str, words: str, ranks: RankPool) -> None:
    for by, size in (("1e-3", "by up to 0.001"), ("an ulp", "by up to ")):
        for text, number in ranks.run(found_drift, plan, name, by, 1):
            assert text.startswith(words) and f"{size}" in text and "before step 4: " in text and "\n" not in text, text
            assert number == 4


def test_drift_is_looked_for_in_one_step_of_several(ranks: RankPool) -> None:
    plan, name, words = CASES[0]
    for text, number in ranks.run(found_drift, plan, name, "an ulp", 5):
        assert words in text and "before step 6: " in text and number == 6
    assert ranks.run(found_drift, plan, name, "an ulp", 0) == [("", 0)] * 4


@pytest.mark.parametrize("plan", [*PROGRAMS, "pp=2,dp=2"])
def test_a_clean_training_raises_no_alarm(plan: str, ranks: RankPool) -> None:
    assert ranks.run(found_drift, plan, "layers.0.norm.weight", "nothing", 1) == [("", 0)] * 4


def found_loss(plan: str, how: str) -> str:
    """On a rank: what the third step says, in which a parameter or the output of a block is not finite."""
    import torch.distributed as dist

    from autopar.runtime.errors import NotFiniteProblem

    parallel = parallel_of(plan, 2)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(2):
        step(parallel, optimizer)
    if how == "a parameter" and "layers.1.scale" in parallel.state.parameters:
        with torch.no_grad():
            parallel.state.parameters["layers.1.scale"].to_local().fill_(float("nan"))
    if how == "an output" and dist.get_rank() == 2:
        block = next(block for block in reversed(list(parallel.program.blocks())) if block.prefix.startswith("layers."))
        block.register_forward_hook(lambda _, __, x: (x[0] * torch.inf, *x[1:]) if isinstance(x, tuple) else x * torch.inf)
    try:
        step(parallel, optimizer)
    except NotFiniteProblem as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("dp=2,tp=2", "an output", "the first block whose output is not finite is layers.1, on rank 2 (dp=1, tp=0)"),
        ("dp=4,zero=3", "an output", "the first block whose output is not finite is layers.1, on rank 2 (dp=2)"),
        ("pp=2,dp=2", "an output", "the first block whose output is not finite is layers.3, on rank 2 (pp=1, dp=0)"),
        ("dp=2,tp=2", "a parameter", "layers.1.scale was not finite before it (on rank 0 (dp=0, tp=0))"),
        ("dp=4,zero=3", "a parameter", "layers.1.scale was not finite before it (on rank 0 (dp=0))"),
        ("pp=2,dp=2", "a parameter", "layers.1.scale was not finite before it (on rank 0 (pp=0, dp=0))"),
    ],
)  # fmt: skip
def test_a_loss_that_is_not_finite_is_named(plan: str, how: str, words: str, ranks: RankPool) -> None:
    for text in ranks.run(found_loss, plan, how):
        assert text.startswith("the loss of step 3 is ") and words in text and "\n" not in text, text
