"""A rank that dies, stops or fails at any moment makes the others end in time, with an error that names it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.harness.failing_run import DIFFERENCES, PLANS, Fault, _Run, failing_runs
from support.harness.rank_pool import RankPool

WORDS = {
    "dies": "died or is stopped", "stops": "died or is stopped", "terminated": "died", "raises": "ValueError: on purpose",
}  # fmt: skip
PLACES = {
    "joining": " while joining the process group",
    "planning": " while planning",
    "first step": " in step 1, ",
    "forward": " in step 2, ",
    "backward": " in step 2, ",
    "saving": " after step 2",
    "full_state": " in step 2, full_state",
    "checkpoint": " in step 2, saving a checkpoint",
}
PATIENCE_SECONDS = 10.0
SHORT = [
    [
        Fault("dp=2,tp=2", "stops", "forward"),
        Fault("dp=4", "dies", "planning"),
        Fault("dp=4,zero=3", "raises", "backward"),
        Fault("pp=2,dp=2", "terminated", "first step"),
    ],
    [
        Fault("dp=4,zero=3", "stops", "saving"),
        Fault("pp=2,dp=2", "raises", "forward"),
        Fault("dp=4", "dies", "joining"),
        Fault("dp=2,tp=2", "terminated", "full_state"),
    ],
    [
        Fault("pp=2,dp=2", "dies", "forward"),
        Fault("dp=2,tp=2", "raises", "saving"),
        Fault("dp=4", "dies", "backward", culprit=0, own_store=True),
        Fault("dp=4,zero=3", "another batch", "first step"),
    ],
]
LONG = [
    *([Fault(plan, how, moment) for plan in PLANS] for how in WORDS for moment in PLACES),
    *([Fault(plan, "another batch", moment) for plan in PLANS] for moment in ("first step", "forward")),
    *([Fault(plan, how, "planning") for plan in PLANS] for how in DIFFERENCES[1:]),
    *([Fault(plan, how, "forward", 0, own_store=True) for plan in PLANS] for how in ("dies", "stops")),
]


def check_runs(
    ranks: RankPool, folder: Path, faults: Sequence[Fault], plans: Callable[[str], str], patience: float, whole_end: bool = False
) -> None:
    for fault, outcomes in failing_runs(ranks, folder, faults, plans, patience, whole_end=whole_end).items():
        for rank, outcome in outcomes.items():
            where = f"{fault}: rank {rank}"
            assert outcome.status and not outcome.left, f"{where} ended with {outcome.status}: {outcome.text}"
            assert outcome.seconds < patience + 1.5, f"{where} took {outcome.seconds:.1f} s: {outcome.text}"
            if rank != fault.culprit or fault.how in DIFFERENCES:
                assert any(is_right(fault, line) for line in outcome.text.splitlines()), f"{where}: {outcome.text}"


def is_right(fault: Fault, line: str) -> bool:
    """Whether a line of a rank's output names the culprit, and says what happened and where."""
    if f"rank {fault.culprit}" not in line:
        return False
    if fault.how in DIFFERENCES:
        return any(
            words in line
            for words in (
                "has a call with",
                "has input",
                "passed different batches",
                "has another model",
                "has torch",
                "has autopar",
            )
        )
    if fault.own_store and "nor does the store" in line:
        return True
    if (fault.how, fault.moment) == ("raises", "checkpoint"):  # all ranks are told what a writer met, and may go on
        return "cannot write the checkpoint" in line and WORDS[fault.how] in line and "those before are as they were" in line
    return WORDS[fault.how] in line and PLACES[fault.moment] in line and f" on {socket.gethostname()} " in line


def named(faults: Sequence[Fault]) -> str:
    return f"{faults[0].how}-{faults[0].moment}{'-own store' * faults[0].own_store}"


@pytest.mark.parametrize("faults", SHORT, ids=["1", "2", "3"])
def test_the_others_end_and_name_it(faults: list[Fault], ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    check_runs(ranks, tmp_path, faults, plans, PATIENCE_SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize("faults", LONG, ids=named)
def test_every_fault_at_every_moment_under_every_plan(
    faults: list[Fault], ranks: RankPool, plans: Callable[[str], str], tmp_path: Path
) -> None:
    check_runs(ranks, tmp_path, faults, plans, 12.0, whole_end=True)


def test_a_rank_that_leaves_a_backward_out_is_named(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    """The others wait for it in the backward, and it for them in the next call."""
    faults = [Fault(plan, "leaves out", "backward") for plan in PLANS]
    for fault, outcomes in failing_runs(ranks, tmp_path, faults, plans, PATIENCE_SECONDS).items():
        for outcome in outcomes.values():
            assert outcome.status == 1 and outcome.seconds < PATIENCE_SECONDS + 1.5, f"{fault}: {outcome.text}"
            lines = [line for line in outcome.text.splitlines() if "call backward on all ranks, or on none" in line]
            assert lines and "rank 2" in lines[-1], f"{fault}: {outcome}, of {outcomes}"


ALONE = [
    [
        Fault("pp=2,dp=2", "alone", "full_state", 0),
        Fault("dp=4,zero=3", "alone", ".full_tensor()", 1),
        Fault("dp=2,tp=2", "alone", "a random draw for a sharded tensor", 2),
        Fault("dp=4,zero=3", "alone", "mm of sharded tensors (16, 8) and (8, 16)", 3),
    ],
    [
        Fault("dp=4,zero=3", "alone", "load_state_dict", 0),
        Fault("dp=2,tp=2", "alone", "load_full_state", 1),
        Fault("dp=4", "alone", "load_full_optimizer_state", 2),
        Fault("dp=4,zero=3", "alone", "a write of an ordinary tensor into a sharded one", 0),
    ],
]


@pytest.mark.parametrize("faults", ALONE, ids=["reads", "writes"])
def test_what_one_rank_does_alone_is_named(
    faults: list[Fault], ranks: RankPool, plans: Callable[[str], str], tmp_path: Path
) -> None:
    """`if rank == 0: parallel.full_state()`: it waits for the others there, and they for it in the next call. A load changes
    nothing before."""
    for fault, outcomes in failing_runs(ranks, tmp_path, faults, plans, PATIENCE_SECONDS).items():
        for outcome in outcomes.values():
            assert outcome.status == 1 and outcome.seconds < PATIENCE_SECONDS + 1.5, f"{fault}: {outcome.text}"
            lines = [line for line in outcome.text.splitlines() if "take it out of `if rank == 0:`" in line]
            words = f"rank {fault.culprit} ", f"in step 1, {fault.moment}, and rank", f": {fault.moment} needs every rank; "
            assert lines and all(each in lines[-1] for each in words), f"{fault}: {outcome.text}"


def test_a_rank_that_reads_one_value_more_is_named(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    """It waits for the last stage where that waits for the first one, after more reads than a beat has."""
    fault = Fault("pp=2,dp=2", "reads", "a read of 1 float32 value of stage 1", 0)
    for outcome in failing_runs(ranks, tmp_path, [fault], plans, PATIENCE_SECONDS)[fault].values():
        assert outcome.status == 1 and outcome.seconds < PATIENCE_SECONDS + 1.5, outcome.text
        lines = [line for line in outcome.text.splitlines() if "take it out of `if rank == 0:`" in line]
        assert lines and "in step 2, a read of 1 float32 value of stage " in lines[-1], outcome.text


def test_a_rank_that_never_comes_is_named(ranks: RankPool, plans: Callable[[str], str], tmp_path: Path) -> None:
    faults = [Fault("dp=4", "never comes", "before joining"), Fault("dp=4", "never comes", "before joining", 0, own_store=True)]
    found = failing_runs(ranks, tmp_path, faults, plans, 4.0, join_seconds=3.0)
    for fault, outcomes in found.items():
        words = "does not answer at localhost" if fault.own_store else "3 of 4 processes joined within 3 s"
        for rank in {0, 1, 2, 3} - {fault.culprit}:
            last = outcomes[rank].text.splitlines()[-1]
            assert outcomes[rank].status == 1 and words in last and f"rank {fault.culprit}" in last, outcomes[rank].text


def test_ranks_that_have_all_ended_between_two_looks_have_ended(tmp_path: Path) -> None:
    run: Any = object.__new__(_Run)
    run.folder, run.fault, run.patience, run.resumed = tmp_path, SHORT[0][1], 1.0, False
    run.forks = [SimpleNamespace(poll=lambda: 1)] * 4
    run.begun, run.struck, run.ended = time.monotonic(), 0.0, {}
    (tmp_path / "struck").touch()
    assert run.finished() and set(run.ended) == {0, 1, 2, 3}
    assert all(status == 1 and 0 <= seconds < 1 for status, seconds in run.ended.values())
